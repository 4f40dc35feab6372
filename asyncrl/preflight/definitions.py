"""Finds the definition of a function or a class that a config names, in its source: nothing is run."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.named_files import unusable
from asyncrl.config.wording import did_you_mean
from asyncrl.plugins import package_spec

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Missing(Exception):
    """A function was not found; the text is the message for the user."""


def definition(name: str) -> Definition | None:
    """Return the definition of `path.py:name`; None for modules, and for names that have no `def` or `class`
    or are bound again."""
    place, _, attribute = name.rpartition(":")
    if ":" in place and not Path(place).is_file():
        raise Missing(f"found two colons in {name}; write `path.py:name`, or `module:name`")
    if not place.endswith(".py"):
        if "/" in place:
            raise Missing(f"found no file {place}; a file needs its suffix; write `{place}.py:{attribute}`")
        package = place.partition(".")[0]
        if package_spec(package) is None:
            cure = f"install it, run from its directory, or give `path.py:{attribute}`"
            raise Missing(f"found no module `{package}`; {cure}")
        place = f"{place.replace('.', '/')}.py"
        if not Path(place).is_file():
            return None
    file = Path(place)
    if not file.is_file():
        raise Missing(f"{unusable(place)}; give `path.py:{attribute}`")
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise Missing(f"{file}{line} is not valid Python: {error}; correct the file") from error
    found = {node.name: node for node in tree.body if isinstance(node, Definition)}
    _refuse_constant(tree, attribute, file)
    if attribute not in found and not any(count_bound(tree, one) for one in (attribute, "*", "__getattr__")):
        hint = did_you_mean(attribute, found, "correct the name")
        raise Missing(f"found no `{attribute}` in {file}; it has {', '.join(found) or 'no functions'}{hint}")
    return found.get(attribute) if count_bound(tree, attribute) == 1 else None


def _refuse_constant(tree: ast.Module, name: str, file: Path) -> None:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Constant(value=value)) if found == name:
                raise Missing(f"`{name}` is {value!r} in {file}:{node.lineno}; name a function or a class")


def count_bound(tree: ast.Module | ast.ClassDef, name: str) -> int:
    """Count how often a module or the body of a class, when it runs, imports, assigns or defines a name."""
    return sum(
        (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)
        or (isinstance(node, ast.alias) and (node.asname or node.name) == name)
        or (isinstance(node, Definition) and node.name == name)
        for node in _run(tree)
    )


def plain_methods(node: Definition | None) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the methods of a class, without those that a decorator or another binding of the name changes."""
    if not isinstance(node, ast.ClassDef) or node.decorator_list:
        return
    for one in node.body:
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) or one.decorator_list:
            continue
        if count_bound(node, one.name) == 1:
            yield one


def _run(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs with a module or a body: no bodies of functions and classes, and no script's part."""
    is_module = isinstance(tree, ast.Module)
    for node in ast.iter_child_nodes(tree):
        if not (is_module and isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
            yield node
            if not isinstance(node, Definition):
                yield from _run(node)


def absent_imports(name: str) -> Iterator[str]:
    """Yield where the file of `path.py:name` imports, at its top level, what this Python does not have."""
    file = Path(name.rpartition(":")[0])
    if file.suffix != ".py" or not file.is_file():
        return
    for node in ast.parse(file.read_bytes()).body:
        match node:
            case ast.Import(names=names):
                packages = [one.name for one in names]
            case ast.ImportFrom(module=str(module), level=0):
                packages = [module]
            case _:
                continue
        for package in (one.partition(".")[0] for one in packages):
            beside = [file.parent / f"{package}.py", file.parent / package]
            if package_spec(package) is None and not any(path.exists() for path in beside):
                yield f"{file}:{node.lineno} imports `{package}`, which is not installed here; install it"


def returns_nothing(node: Definition) -> str:
    """Say that no call of a function returns a value; empty if one may, or if its body is `...`."""
    body = [*_run(ast.Interactive(node.body))]
    if any(isinstance(one, ast.Yield | ast.YieldFrom) for one in body):
        return "yields, so calling it makes a generator, not a number; return the number"
    returns = (isinstance(one, ast.Return) and one.value is not None for one in body)
    if any(returns) or any(isinstance(one, ast.Constant) and one.value is ... for one in body):
        return ""
    return "has no `return` with a value, so every response would go without a reward; return a number"


def parameters_of(arguments: ast.arguments) -> list[inspect.Parameter]:
    """Return parameters as `inspect.signature` does; `...` stands for the unknown value of a default."""
    kind, positional = inspect.Parameter, [*arguments.posonlyargs, *arguments.args]
    optional = positional[len(positional) - len(arguments.defaults) :]
    found = [
        kind(
            one.arg,
            kind.POSITIONAL_ONLY if one in arguments.posonlyargs else kind.POSITIONAL_OR_KEYWORD,
            default=... if one in optional else kind.empty,
        )
        for one in positional
    ]
    found += [kind(arguments.vararg.arg, kind.VAR_POSITIONAL)] if arguments.vararg else []
    found += [
        kind(one.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else ...)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return found + ([kind(arguments.kwarg.arg, kind.VAR_KEYWORD)] if arguments.kwarg else [])
