"""Reads files and overrides into a checked `Config`, or reports every mistake with its line."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from asyncrl.config import registry
from asyncrl.config.agreements import disagreements
from asyncrl.config.algorithm import CHOICES, default_name, kind_at
from asyncrl.config.document import Node, Problem, merge, override, placed, read
from asyncrl.config.draft import Draft, repaired
from asyncrl.config.report import panel, problems_of, schema_at
from asyncrl.config.resolved import config_hash, config_json, dump_config
from asyncrl.config.schema import Config
from asyncrl.config.wording import describe, shown
from asyncrl.errors import ConfigError

__all__ = ["checked", "config_hash", "config_json", "dump_config", "load_config", "read_draft"]


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Load a YAML file and apply `key.path=value` overrides; a later override wins.

    A value of an override is YAML; a number in its path picks an item of a list
    (`reward.functions.0.weight=2`). `extends: other.yaml` (or a list) puts the file on top of others; paths
    are relative to the file.

    Raises:
        ConfigError: its text lists every problem as `file:line  key.path: found; allowed; what to do`.
    """
    return checked(read_draft(path, overrides))


def checked(draft: Draft) -> Config:
    """Return the config of a draft. Raises ConfigError with all problems, if it has any."""
    if draft.problems or draft.config is None:
        problems = sorted(draft.problems, key=_reading_order)
        raise ConfigError(panel(problems, title=str(draft.path)))
    return draft.config


def read_draft(path: Path, overrides: Sequence[str] = ()) -> Draft:
    """Read what `load_config` makes its config of, with the problems found so far. Raises ConfigError if it
    is not YAML."""
    root, problems = read(path)
    for text in overrides:
        try:
            root = Node(merge(root, override(text)).value, root.place)
        except ConfigError as error:
            problems.extend(Problem("", (), line) for line in str(error).splitlines())
    root = _with_default_names(root)
    problems += [*_misread(root), *_choice_problems(root)]
    reported = {problem.keys for problem in problems}
    try:
        return Draft(path, root, problems, Config.model_validate(root.plain()))
    except ValidationError as error:
        problems += [problem for problem in problems_of(error, root) if problem.keys not in reported]
    draft = Draft(path, root, problems, repaired(root, [problem.keys for problem in problems]))
    for mistake in disagreements(dict(draft.config)) if draft.config else ():
        draft.add(mistake)
    return draft


def _reading_order(problem: Problem) -> tuple[bool, str, int]:
    """Sort problems in files by line, and those of overrides last."""
    file, _, line = problem.place.rpartition(":")
    return (not line.isdecimal(), file, int(line) if line.isdecimal() else 0)


def _with_default_names(root: Node) -> Node:
    """Add the default names of choices, so that `algorithm.advantage.scale=none` concerns the default
    advantage."""
    for keys in CHOICES:
        name, node = default_name(keys), root.nearest(keys)
        if root.has(keys) and isinstance(node.value, dict) and "name" not in node.value:
            node.value["name"] = Node(name, node.place)
    return root


def _misread(root: Node) -> Iterator[Problem]:
    """Find booleans in place of numbers, which Python would accept as 0 and 1."""
    for keys, node in root.walk():
        schema = schema_at(keys) if isinstance(node.value, bool) else {}
        if schema.get("type") in ("integer", "number"):
            yield Problem(
                node.place,
                keys,
                f"found {shown(node.value)}; allowed is {describe(schema)}; correct the value",
            )


def _choice_problems(root: Node) -> Iterator[Problem]:
    """Find mistakes in the chosen functions and their parameters."""
    for keys, node in root.walk():
        kind = kind_at(keys)
        params = node.plain() if kind else None
        if kind is None or not isinstance(params, dict) or not isinstance(params.get("name"), str):
            continue
        for mistake in registry.mistakes(kind, params.pop("name"), params):
            problem = placed(mistake, node)
            yield Problem(problem.place, (*keys, *problem.keys), problem.text)
