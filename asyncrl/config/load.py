"""Reads files and overrides into a checked config, or reports every mistake with its line.

A config with mistakes is repaired far enough to look for further ones, so that all are reported together.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from asyncrl.config import registry
from asyncrl.config.base import SECTIONS_ONLY, Keys, Mistake, Root
from asyncrl.config.document import Node, Problem, keys_of, merge, override, placed, read
from asyncrl.config.outline import default_name, kind_at, schema_at
from asyncrl.config.report import panel, problems_of
from asyncrl.config.schema import Config
from asyncrl.config.wording import describe, shown
from asyncrl.errors import ConfigError

R = TypeVar("R", bound=Root)
# How often `_repaired` removes wrong values: removing one may uncover another.
ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Draft(Generic[R]):
    """A config, its text and its problems so far."""

    path: Path
    root: Node
    problems: list[Problem]
    config: R | None
    """The config without its wrong values; None if too few are right."""

    def add(self, mistake: Mistake) -> None:
        """Add a mistake, unless a problem of one of its keys or their section may be its cause."""
        problem = placed(mistake, self.root)
        # A whole section that is wrong was replaced by its defaults.
        doubtful = [one.keys[:-1] if one.misplaced else one.keys for one in self.problems]
        unknown_section = any(one.misplaced and len(one.keys) == 1 for one in self.problems)
        if unknown_section and not self.root.has(problem.keys):
            return
        concerned = [keys_of(name) for name in mistake.keys]
        if not any(keys[: len(cause)] == cause for keys in concerned for cause in doubtful if cause):
            self.problems.append(problem)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Load the config of a run (see `load`)."""
    return load(Config, path, overrides)


def load(model: type[R], path: Path, overrides: Sequence[str] = ()) -> R:
    """Load a YAML file and apply `key.path=value` overrides; a later override wins.

    `document.read` describes `extends`, and `document.override` the form of an override.

    Raises:
        ConfigError: its text lists every problem as `file:line  key.path: found; allowed; what to do`.
    """
    return checked(read_draft(model, path, overrides))


def checked(draft: Draft[R]) -> R:
    """Return the config of a draft. Raises ConfigError with all problems, if it has any."""
    if draft.problems or draft.config is None:
        problems = sorted(draft.problems, key=_reading_order)
        raise ConfigError(panel(problems, title=str(draft.path)))
    return draft.config


def read_draft(model: type[R], path: Path, overrides: Sequence[str] = ()) -> Draft[R]:
    """Read files and overrides, and find their problems. Raises ConfigError for a file that is not YAML."""
    root, problems = read(model, path)
    for text in overrides:
        try:
            root = Node(merge(model, root, override(model, text)).value, root.place)
        except ConfigError as error:
            problems.extend(Problem("", (), line) for line in str(error).splitlines())
    root = _with_default_names(model, root)
    problems += [*_misread(model, root), *_choice_problems(model, root)]
    reported, wrong = {problem.keys for problem in problems}, list[Problem]()
    try:
        return Draft(path, root, problems, model.model_validate(root.plain()))
    except ValidationError as error:
        wrong = [problem for problem in problems_of(model, error, root) if problem.keys not in reported]
    problems += wrong
    draft = Draft(path, root, problems, _repaired(model, root, [problem.keys for problem in problems]))
    # Defaults took the place of values of a wrong type, so no rule may judge these sections.
    replaced = {str(problem.keys[0]) for problem in wrong if problem.replaced}
    for mistake in draft.config.disagreements(without=replaced) if draft.config else ():
        draft.add(mistake)
    return draft


def _reading_order(problem: Problem) -> tuple[bool, str, int]:
    """Sort problems in files by line, and those of overrides last."""
    file, _, line = problem.place.rpartition(":")
    return (not line.isdecimal(), file, int(line) if line.isdecimal() else 0)


def _with_default_names(model: type[Root], root: Node) -> Node:
    """Add the default names of choices, so that `algorithm.advantage.scale=none` needs no name."""
    for keys, node in list(root.walk()):
        name = default_name(model, keys)
        if name and isinstance(node.value, dict) and "name" not in node.value:
            node.value["name"] = Node(name, node.place)
    return root


def _misread(model: type[Root], root: Node) -> Iterator[Problem]:
    """Find booleans in place of numbers, which Python would accept as 0 and 1."""
    for keys, node in root.walk():
        schema = schema_at(model, keys) if isinstance(node.value, bool) else {}
        if schema.get("type") in ("integer", "number"):
            text = f"found {shown(node.value)}; allowed is {describe(schema)}; correct the value"
            yield Problem(node.place, keys, text)


def _choice_problems(model: type[Root], root: Node) -> Iterator[Problem]:
    """Find mistakes in the chosen functions and their parameters."""
    for keys, node in root.walk():
        kind = kind_at(model, keys)
        params = node.plain() if kind else None
        if kind is None or not isinstance(params, dict) or not isinstance(params.get("name"), str):
            continue
        for mistake in registry.mistakes(kind, params.pop("name"), params):
            problem = placed(mistake, node)
            yield Problem(problem.place, (*keys, *problem.keys), problem.text)


def _repaired(model: type[R], root: Node, wrong: Iterable[Keys]) -> R | None:
    """Return the config with defaults in place of the values at `wrong` and of any other invalid value."""
    values = deepcopy(root.plain())
    for keys in wrong:
        _take_out(values, keys)
    for _ in range(ROUNDS):
        try:
            return model.model_validate(values, context=SECTIONS_ONLY)
        except ValidationError as error:
            for detail in error.errors():
                _repair(model, values, tuple(detail["loc"]), missing=detail["type"] == "missing")
    return None


def _repair(model: type[Root], values: Any, keys: Keys, *, missing: bool) -> None:
    """Fill a missing key with a stand-in, and remove a wrong value or a section that lacks another key."""
    if not missing:
        _take_out(values, keys)
    elif "stand_in" in (schema := schema_at(model, keys)):
        _parent(values, keys)[keys[-1]] = deepcopy(schema["stand_in"])
    elif len(keys) == 1:
        values[keys[0]] = {}
    else:
        _take_out(values, keys[:-1])


def _take_out(values: Any, keys: Keys) -> None:
    parent = _parent(values, keys) if keys else None
    if isinstance(parent, dict):
        parent.pop(keys[-1], None)
    elif isinstance(parent, list) and isinstance(keys[-1], int) and keys[-1] < len(parent):
        del parent[keys[-1]]


def _parent(values: Any, keys: Keys) -> Any:
    for key in keys[:-1]:
        if isinstance(values, dict):
            values = values.get(key)
        elif isinstance(values, list) and isinstance(key, int) and key < len(values):
            values = values[key]
        else:
            return None
    return values
