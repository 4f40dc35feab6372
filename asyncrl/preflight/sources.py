"""Checks without running user code that a user's functions exist and can be called."""

import ast
import difflib
import inspect
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from asyncrl.config.algorithm import kind_at
from asyncrl.config.base import Mistake
from asyncrl.config.document import Node
from asyncrl.config.named_files import absent
from asyncrl.config.schema import Config
from asyncrl.errors import RewardError
from asyncrl.rewards.builtin import BUILTINS
from asyncrl.rewards.forms import Form, form_of

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Missing(Exception):
    """A function was not found; the text is the message for the user."""


def source_problems(config: Config, root: Node) -> Iterator[Mistake]:
    """Mistakes in the names of reward functions, hooks and functions of the algorithm."""
    for index, one in enumerate(config.reward.functions):
        try:
            reward_form(one.function)
        except Missing as missing:
            yield Mistake((f"reward.functions.{index}.function",), str(missing))
    own_names = [
        (f"learner.hooks.{index}.name", hook.name) for index, hook in enumerate(config.learner.hooks)
    ]
    for keys, node in root.walk():
        chosen = node.child("name") if kind_at(keys) else None
        if chosen and isinstance(chosen.value, str) and ":" in chosen.value:
            own_names.append((".".join(map(str, (*keys, "name"))), chosen.value))
    for key, name in own_names:
        try:
            _definition(name)
        except Missing as missing:
            yield Mistake((key,), str(missing))


def reward_form(name: str) -> Form | None:
    """The call form of a reward function; None if only running its module would tell. Raises Missing."""
    if ":" not in name:
        if name not in BUILTINS:
            close = difflib.get_close_matches(name, BUILTINS, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else "; name your own as `path.py:function`"
            raise Missing(f"found no built-in `{name}`; allowed are {', '.join(BUILTINS)}{hint}")
        return form_of(list(inspect.signature(BUILTINS[name]).parameters.values()))
    node = _definition(name)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    try:
        return form_of(_parameters(node.args))
    except RewardError as error:
        raise Missing(f"`{name.rpartition(':')[2]}` {error}") from error


def _parameters(arguments: ast.arguments) -> list[inspect.Parameter]:
    """Parameters as in `inspect.signature`; the value of a default is unknown and stands as `...`."""
    kind, positional = inspect.Parameter, [*arguments.posonlyargs, *arguments.args]
    defaults = [kind.empty] * (len(positional) - len(arguments.defaults)) + [...] * len(arguments.defaults)
    found = [
        kind(
            one.arg,
            kind.POSITIONAL_ONLY if one in arguments.posonlyargs else kind.POSITIONAL_OR_KEYWORD,
            default=default,
        )
        for one, default in zip(positional, defaults, strict=True)
    ]
    found += [kind(arguments.vararg.arg, kind.VAR_POSITIONAL)] if arguments.vararg else []
    found += [
        kind(one.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else ...)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return found + ([kind(arguments.kwarg.arg, kind.VAR_KEYWORD)] if arguments.kwarg else [])


def _definition(name: str) -> Definition | None:
    """The definition of `path.py:name`; None for names in modules and names that are not defined by def or
    class."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        if "/" in place:
            raise Missing(
                f"found no file {place}; a file is named as `path.py:function`; write "
                f"`{place}.py:{attribute}`"
            )
        package = place.partition(".")[0]
        if PathFinder.find_spec(package) is None and PathFinder.find_spec(package, [str(Path.cwd())]) is None:
            raise Missing(
                f"found no module `{package}`; install it, run from its directory, or give "
                f"`path.py:{attribute}`"
            )
        return None
    file = Path(place)
    if not file.is_file():
        raise Missing(f"{absent(place)}; give `path.py:{attribute}`")
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise Missing(f"{file}{line} is not valid Python: {error}; correct the file") from error
    found = {node.name: node for node in tree.body if isinstance(node, Definition)}
    if attribute not in found and not _is_bound(tree, attribute):
        close = difflib.get_close_matches(attribute, found, n=1)
        hint = f"did you mean `{close[0]}`?" if close else "correct the name"
        raise Missing(
            f"found no `{attribute}` in {file}; it has {', '.join(found) or 'no functions'}; {hint}"
        )
    return found.get(attribute)


def _is_bound(tree: ast.Module, name: str) -> bool:
    """Whether a name is imported, assigned, or defined below the top level of a module."""
    return any(
        (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)
        or (isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"))
        or (isinstance(node, Definition) and node.name == name and node not in tree.body)
        for node in ast.walk(tree)
    )
