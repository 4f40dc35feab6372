"""A user's own functions and rows, looked at without running anything: do they exist, and do they fit each other?"""

import ast
import difflib
import inspect
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from asyncrl.config.choices import kind_at
from asyncrl.config.document import Node
from asyncrl.config.files import Finding, absent, is_local
from asyncrl.config.schema import Config
from asyncrl.rewards.builtin import BUILTINS

BYTES = 1 << 22
"""Of the first row: a longer one is looked at when the run starts."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Missing(Exception):  # not an error: carries what to tell
    """A function that is not where its name says."""


def source_problems(config: Config, root: Node) -> Iterator[Finding]:
    """What is wrong with reward functions, hooks and functions of the algorithm, and with the columns they are called with."""
    wanted: dict[str, list[str]] = {}
    for index, one in enumerate(config.reward.functions):
        key = f"reward.functions.{index}.function"
        try:
            wanted[key] = _reward_columns(one.function)
        except Missing as missing:
            yield key, str(missing)
    for key, name in _own_names(config, root):
        try:
            _definition(name)
        except Missing as missing:
            yield key, str(missing)
    for key, split in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        yield from _row_problems(config, key, split, wanted)


def _own_names(config: Config, root: Node) -> Iterator[tuple[str, str]]:
    for index, hook in enumerate(config.learner.hooks):
        yield f"learner.hooks.{index}.name", hook.name
    for keys, node in root.walk():
        name = node.child("name") if kind_at(keys) else None
        if name and isinstance(name.value, str) and ":" in name.value:
            yield ".".join(map(str, (*keys, "name"))), name.value


def _reward_columns(name: str) -> list[str]:
    """Columns that a reward function cannot do without."""
    if ":" not in name:
        if name not in BUILTINS:
            close = difflib.get_close_matches(name, BUILTINS, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else "; name your own as `path.py:function`"
            raise Missing(f"found no built-in `{name}`; allowed are {', '.join(BUILTINS)}{hint}")
        parameters = list(inspect.signature(BUILTINS[name]).parameters.values())[2:]
        return [one.name for one in parameters if one.default is one.empty]
    node = _definition(name)
    return (
        _required(node.args)[2:] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list else []
    )


def _required(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    named = [one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    return [one.arg for one in positional[: len(positional) - len(arguments.defaults)]] + named


def _definition(name: str) -> Definition | None:
    """Where `path.py:name` defines it; None for a module's, which would have to be run, and for what is made in another way."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        package = place.partition(".")[0]
        if PathFinder.find_spec(package) is None and PathFinder.find_spec(package, [str(Path.cwd())]) is None:
            raise Missing(f"found no module `{package}`; install it, run from its directory, or give `path.py:{attribute}`")
        return None
    file = Path(place)
    if not file.is_file():
        raise Missing(f"{absent(place)}; give `path.py:{attribute}`")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise Missing(f"{file}{line} is no Python: {error}; mend the file") from error
    found = {node.name: node for node in tree.body if isinstance(node, Definition)}
    if attribute not in found and not _is_bound(tree, attribute):
        close = difflib.get_close_matches(attribute, found, n=1)
        hint = f"did you mean `{close[0]}`?" if close else "correct the name"
        raise Missing(f"found no `{attribute}` in {file}; it has {', '.join(found) or 'no functions'}; {hint}")
    return found.get(attribute)


def _is_bound(tree: ast.Module, name: str) -> bool:
    """Whether a name may come to be in another way than by a definition at the top: imported, assigned, in a condition."""
    return any(
        (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)
        or (isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"))
        or (isinstance(node, Definition) and node.name == name and node not in tree.body)
        for node in ast.walk(tree)
    )


def _row_problems(config: Config, key: str, source: str | None, wanted: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    if source is None or not is_local(source) or not Path(source).is_file():
        return
    if Path(source).suffix not in (".jsonl", ".json", ".parquet"):
        yield key, f"found the suffix `{Path(source).suffix}`; allowed are .jsonl, .json, .parquet; convert the file"
        return
    try:
        row = _first_row(Path(source))
    except ValueError as error:
        yield key, f"found no JSON object in the first row of {source} ({error}); allowed is one object per row; mend it"
        return
    if row is None:
        return
    for name, columns in {_prompt_key(config): _prompt_columns(config), **wanted}.items():
        if lacking := [column for column in columns if column not in row]:
            close = difflib.get_close_matches(lacking[0], row, n=1, cutoff=0.5)
            hint = f"did you mean `{close[0]}`?" if close else "add it to the data or name another"
            named = ", ".join(f"`{column}`" for column in lacking)
            yield name, f"wants column {named}, which {source} lacks; it has {', '.join(row)}; {hint}"


def _prompt_key(config: Config) -> str:
    return "data.prompt_field" if config.data.template is None else "data.template"


def _prompt_columns(config: Config) -> list[str]:
    if config.data.template is None:
        return [config.data.prompt_field]
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(config.data.template) if name]
    except ValueError:  # the run's own message says what is wrong with it
        return []
    return [name.split(".")[0].split("[")[0] for name in names]


def _first_row(path: Path) -> dict[str, Any] | None:
    """None where looking would cost: parquet, and rows of megabytes."""
    if path.suffix == ".parquet" or (path.suffix == ".json" and path.stat().st_size > BYTES):
        return None
    with path.open("rb") as file:
        data = (
            file.read()
            if path.suffix == ".json"
            else next((line for line in iter(lambda: file.readline(BYTES), b"") if line.strip()), b"")
        )
    if len(data) >= BYTES:
        return None
    row = json.loads(data)
    row = row[0] if isinstance(row, list) and row else row
    if not isinstance(row, dict):
        raise ValueError(f"found {type(row).__name__}")
    return row
