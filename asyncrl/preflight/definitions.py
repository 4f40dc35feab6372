"""Mistakes in the functions and classes that a config names, found in their source: nothing is run."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.base import Mistake
from asyncrl.config.document import Node
from asyncrl.config.environment_section import is_rollout
from asyncrl.config.named_files import unusable
from asyncrl.config.outline import kind_at
from asyncrl.config.reward_section import REMOTE, Judge, RewardFunctionConfig
from asyncrl.config.schema import Config
from asyncrl.config.wording import did_you_mean
from asyncrl.environments.named import TOOLS, is_named
from asyncrl.errors import RewardError
from asyncrl.plugins import package_spec
from asyncrl.rewards.builtin import BUILTINS, obstacle
from asyncrl.rewards.endpoints import columns_of
from asyncrl.rewards.forms import Form, form_of

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Methods of an environment, and what each call passes, besides columns by name.
CALLED = {"reset": ("self",), "step": ("self", "text")}


class Missing(Exception):
    """A function was not found; the text is the message for the user."""


def function_problems(config: Config, root: Node, *, generators: bool) -> Iterator[Mistake]:
    """Find mistakes in the names of functions: of rewards, rows, hooks and the algorithm.

    With `generators` these are on this machine, which then must have the interpreters of programs, too.
    """
    for key, one in config.reward_functions.items():
        try:
            form = reward_form(one)
            if generators and (lacking := obstacle(one.function, one.params)):
                raise Missing(lacking)
            if form is not None and one.remote is None and (problem := form.refusal(one.params)):
                raise RewardError(f"`{one.function}` {problem}")
        except Missing as missing:
            yield Mistake((f"{key}.function",), str(missing))
        except RewardError as error:
            yield Mistake((f"{key}.{'params' if one.remote is None else 'params.prompt'}",), str(error))
    yield from _environment_problems(config)
    own_names = [*config.data.functions.items()]
    own_names += [(f"learner.hooks.{index}.name", one.name) for index, one in enumerate(config.learner.hooks)]
    for keys, node in root.walk():
        chosen = node.children.get("name") if kind_at(Config, keys) else None
        if chosen and isinstance(chosen.value, str) and ":" in chosen.value:
            own_names.append((".".join(map(str, (*keys, "name"))), chosen.value))
    for key, name in own_names:
        try:
            definition(name)
        except Missing as missing:
            yield Mistake((key,), str(missing))


def _environment_problems(config: Config) -> Iterator[Mistake]:
    """Find names that the environment's file lacks, and tools for a model that cannot call any."""
    for key, name, environment in config.environment_names:
        node = None
        if not is_named(name):
            if ":" not in name:
                allowed = f"`path.py:Name`, `module:Name`, `library:NAME`, {', '.join(TOOLS)}"
                yield Mistake((key,), f"found `{name}`; allowed is {allowed}")
                continue
            if environment.python and not name.rpartition(":")[0].endswith(".py"):
                continue  # a module of another Python, which finds it or says what it lacks
            try:
                node = definition(name)
            except Missing as missing:
                # Another Python has another grammar.
                if not (environment.python and isinstance(missing.__cause__, SyntaxError)):
                    yield Mistake((key,), str(missing))
                continue
        yield from _unshown_tools(config, key, name, node)
        yield from _wrongly_called(key, name, node)


def _wrongly_called(key: str, name: str, node: Definition | None) -> Iterator[Mistake]:
    """Find methods that take other arguments; a decorator or another binding of the name may change them."""
    if not isinstance(node, ast.ClassDef) or node.decorator_list:
        return
    for one in node.body:
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) or one.decorator_list:
            continue
        if (called := CALLED.get(one.name)) is None or _count_bound(node, one.name) > 1:
            continue
        try:
            call = inspect.Signature(_parameters_of(one.args))
            call.bind(*called) if one.name == "step" else call.bind_partial(*called)
        except (TypeError, ValueError):
            found = f"`{one.name}` of `{name}` takes ({ast.unparse(one.args)}) in line {one.lineno}"
            cure = f"write `def {one.name}({', '.join(called)})`"
            yield Mistake((key,), f"{found}, but is called with ({', '.join(called)}); {cure}")


def _unshown_tools(config: Config, key: str, name: str, node: Definition | None) -> Iterator[Mistake]:
    """Find tools that no template shows to the model; decorators of a function may make anything of it."""
    if isinstance(node, ast.ClassDef):
        has_step = node.bases or _count_bound(node, "step")
        found = "" if has_step else f"the public methods of `{name}` are tools"
        cure = "add a method `step`, with which it takes plain text"
    else:
        is_tool = name in TOOLS or (node and not node.decorator_list and not is_rollout(node))
        found = f"`{name}` is a tool" if is_tool else ""
        cure = "name a class with `reset` and `step`, which takes plain text"
    if found and not config.model.chat_template:
        text = f"{found}, but model.chat_template is false; set it to true, or {cure}"
        yield Mistake((key, "model.chat_template"), text)


def reward_form(function: RewardFunctionConfig) -> Form | None:
    """Return the call form of a reward function, or None if only running it would tell.

    Raises Missing, and RewardError for a judge's template.
    """
    if (remote := function.remote) is not None:
        columns = columns_of(remote) if isinstance(remote, Judge) else frozenset()
        return Form(accepted=columns, required=columns, takes_all=True)
    name = function.function
    if ":" not in name:
        if name not in BUILTINS:
            known = (*BUILTINS, *REMOTE)
            hint = did_you_mean(name, known, "name your own as `path.py:function`")
            raise Missing(f"found no built-in `{name}`; allowed are {', '.join(known)}{hint}")
        if lacking := obstacle(name):
            raise Missing(lacking)
        return form_of(list(inspect.signature(BUILTINS[name]).parameters.values()))
    node = definition(name)
    if isinstance(node, ast.ClassDef):
        found = f"`{node.name}` is a class, and calling it makes an object, not a number"
        raise Missing(f"{found}; name a function, or an object: `{node.name.lower()}_ = {node.name}()`")
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    try:
        form = form_of(_parameters_of(node.args))
    except RewardError as error:
        raise Missing(f"`{node.name}` {error}") from error
    if found := returns_nothing(node):
        raise Missing(f"`{node.name}` {found}")
    return form


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
    if attribute not in found and not any(_count_bound(tree, one) for one in (attribute, "*", "__getattr__")):
        hint = did_you_mean(attribute, found, "correct the name")
        raise Missing(f"found no `{attribute}` in {file}; it has {', '.join(found) or 'no functions'}{hint}")
    return found.get(attribute) if _count_bound(tree, attribute) == 1 else None


def _refuse_constant(tree: ast.Module, name: str, file: Path) -> None:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Constant(value=value)) if found == name:
                raise Missing(f"`{name}` is {value!r} in {file}:{node.lineno}; name a function or a class")


def _count_bound(tree: ast.Module | ast.ClassDef, name: str) -> int:
    """Count how often a module or the body of a class, when it runs, imports, assigns or defines a name."""
    return sum(
        (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)
        or (isinstance(node, ast.alias) and (node.asname or node.name) == name)
        or (isinstance(node, Definition) and node.name == name)
        for node in _run(tree)
    )


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


def _parameters_of(arguments: ast.arguments) -> list[inspect.Parameter]:
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
