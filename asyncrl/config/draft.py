"""A config with mistakes, repaired far enough to look for further ones, so that all are reported together."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncrl.config.base import Keys, Mistake
from asyncrl.config.document import Node, Problem, keys_of, placed
from asyncrl.config.schema import SECTIONS_ONLY, Config

# Stand-ins for required keys that are missing. They are hub names, so no file is looked for.
PLACEHOLDERS: dict[Keys, Any] = {
    ("run", "name"): "unnamed",
    ("model", "path"): "no/model",
    ("data", "train"): "no/data",
    ("reward", "functions"): [{"function": "exact_match"}],
}
# How often `repaired` removes wrong values: removing one may uncover another.
ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Draft:
    """A config, its text and its problems so far."""

    path: Path
    root: Node
    problems: list[Problem]
    config: Config | None
    """The config without its wrong values; None if too few are right."""

    def add(self, mistake: Mistake) -> None:
        """Add a mistake, unless it may be a consequence of a problem already reported for one of its keys or
        their section."""
        problem = placed(mistake, self.root)
        doubtful = [one.keys[:-1] if one.misplaced else one.keys for one in self.problems]
        # A whole section that is wrong was replaced by its defaults.
        doubtful = [keys for keys in doubtful if keys]
        unknown_section = any(one.misplaced for one in self.problems if len(one.keys) == 1)
        if unknown_section and not self.root.has(problem.keys):
            return
        if not any(keys[: len(known)] == known for keys in map(keys_of, mistake.keys) for known in doubtful):
            self.problems.append(problem)


def repaired(root: Node, wrong: Iterable[Keys]) -> Config | None:
    """Return the config with defaults in place of the values at `wrong` and of any other invalid value."""
    values = deepcopy(root.plain())
    for keys in wrong:
        _take_out(values, keys)
    for _ in range(ROUNDS):
        try:
            return Config.model_validate(values, context=SECTIONS_ONLY)
        except ValidationError as error:
            for detail in error.errors():
                _repair(values, tuple(detail["loc"]), missing=detail["type"] == "missing")
    return None


def _repair(values: Any, keys: Keys, *, missing: bool) -> None:
    if not missing:
        _take_out(values, keys)
    elif keys in PLACEHOLDERS:
        _parent(values, keys)[keys[-1]] = deepcopy(PLACEHOLDERS[keys])
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
