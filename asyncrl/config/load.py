"""Reads files and overrides into a checked config, or reports every mistake with its line.

A config with mistakes is repaired far enough to look for further ones, so that all are reported together.
"""

import difflib
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from asyncrl.config import registry
from asyncrl.config.base import SECTIONS_ONLY, Keys, Mistake, Mistakes, Root
from asyncrl.config.document import Node, Problem, keys_of, merge, override, placed, read
from asyncrl.config.outline import all_paths, default_name, known_keys, schema_at
from asyncrl.config.schema import Config
from asyncrl.config.wording import Schema, describe, did_you_mean, shown, wanted
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

    `document.read` describes `extends`, and `document.override` the form of an override. Raises ConfigError,
    whose text lists every problem as `file:line  key.path: found; allowed; what to do`.
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
    problems += _noticed(model, root)
    reported, wrong = {problem.keys for problem in problems}, list[Problem]()
    try:
        return Draft(path, root, problems, model.model_validate(root.plain()))
    except ValidationError as error:
        found = [problem for detail in error.errors() for problem in _problems_of(model, detail, root)]
        wrong = [problem for problem in _told_once(found) if problem.keys not in reported]
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


def _noticed(model: type[Root], root: Node) -> Iterator[Problem]:
    """Find what pydantic would accept, and add the default names of choices.

    That is a boolean in place of a number, which Python takes for 0 or 1, and every mistake in a chosen
    function and its parameters. With a name, `algorithm.advantage.scale=none` is a choice.
    """
    for keys, node in [*root.walk()]:
        schema = schema_at(model, keys)
        kinds = {one.get("type") for one in schema.get("anyOf", [schema])}
        if isinstance(node.value, bool) and kinds & {"integer", "number"} and "boolean" not in kinds:
            text = f"found {shown(node.value)}; allowed is {describe(schema)}; correct the value"
            yield Problem(node.place, keys, text)
        if "kind" not in schema or not isinstance(node.value, dict):
            continue
        if name := default_name(model, keys):
            node.value.setdefault("name", Node(name, node.place))
        params = node.plain()
        if isinstance(params.get("name"), str):
            for mistake in registry.mistakes(schema["kind"], params.pop("name"), params):
                problem = placed(mistake, node)
                yield Problem(problem.place, (*keys, *problem.keys), problem.text)


def _repaired(model: type[R], root: Node, wrong: Iterable[Keys]) -> R | None:
    """Return the config with defaults in place of the values at `wrong` and of any other invalid value.

    A missing key gets its stand-in; without one, the section that lacks it goes.
    """
    values = root.plain()
    for keys in wrong:
        _take_out(values, keys)
    for _ in range(ROUNDS):
        try:
            return model.model_validate(values, context=SECTIONS_ONLY)
        except ValidationError as error:
            for detail in error.errors():
                keys = _written(detail, values)
                if detail["type"] != "missing":
                    _take_out(values, keys)
                elif "stand_in" in (schema := schema_at(model, keys)):
                    _parent(values, keys)[keys[-1]] = deepcopy(schema["stand_in"])
                elif len(keys) == 1:
                    values[keys[0]] = {}
                else:
                    _take_out(values, keys[:-1])
    return None


def _take_out(values: Any, keys: Keys) -> None:
    with suppress(LookupError, TypeError):  # it is gone with what was above it
        del _parent(values, keys)[keys[-1]]


def _told_once(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Yield the problems, of values of a wrong type only the first of each key, and none of their lists.

    Each member of a union complains, one about a list as a whole and another about an item of it.
    """
    told = {one.keys[:length] for one in problems if one.replaced for length in range(len(one.keys))}
    for one in problems:
        if one.replaced and one.keys in told:
            continue
        told |= {one.keys} if one.replaced else set()
        yield one


def _written(detail: Any, values: Any) -> Keys:
    """Return where in `values` an error is, without pydantic's names of unions. A missing key comes last."""
    keys, last = list[str | int](), detail["loc"][-1:] if detail["type"] == "missing" else ()
    for key in detail["loc"]:
        if isinstance(values, dict | list):
            with suppress(LookupError, TypeError):
                values = values[key]
                keys.append(key)
    return (*keys, *last)


def _parent(values: Any, keys: Keys) -> Any:
    return functools.reduce(operator.getitem, keys[:-1], values)


def panel(problems: Iterable[Problem | str], *, title: str) -> str:
    """List all problems, one per line, under a title with their number."""
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return "\n".join([f"{count} in {title}", *(f"  {line}" for line in lines)])


def _problems_of(model: type[Root], detail: Any, root: Node) -> Iterator[Problem]:
    """Convert an error of pydantic to problems with places."""
    keys = _written(detail, root.plain())
    place, schema = root.nearest(keys).place, schema_at(model, keys)
    match detail["type"]:
        case "too_short" if detail["input"]:
            return  # A wrong item leaves the list short; the item is reported.
        case "extra_forbidden":
            yield Problem(place, keys, f"found an unknown key; {_suggest_key(model, keys)}", misplaced=True)
        case "missing" if keys[:-1] and root.nearest(keys[:-1]).plain() is None:
            return  # The section itself is reported.
        case "missing" if isinstance(keys[-1], int):
            keys, found = keys[:-1], root.nearest(keys[:-1]).plain()
            text = f"found {shown(found)}; allowed is {describe(schema_at(model, keys))}; correct the value"
            yield Problem(place, keys, text, replaced=True)
        case "missing":
            description = str(schema.get("description", "")).partition(". ")[0].rstrip(".")
            needed = description or describe(schema) or "a value"
            yield Problem(place, keys, f"found nothing; it is needed: {needed}; add `{keys[-1]}: ...`")
        case "value_error" if isinstance(error := detail["ctx"]["error"], Mistakes):
            for mistake in error.mistakes:
                # Functions of a source of data know their own section only.
                is_elsewhere = keys and keys[0] != mistake.keys[0].partition(".")[0]
                yield Problem(place, keys, mistake.text) if is_elsewhere else placed(mistake, root)
        case "value_error":
            yield Problem(place, keys, str(detail["ctx"]["error"]))
        case _:
            text = f"found {shown(detail['input'])}; {_allowed(schema, detail)}"
            yield Problem(place, keys, text, replaced=True)


def _allowed(schema: Schema, detail: Any) -> str:
    text = f"allowed is {wanted(schema, detail['type'])}"
    found = detail["input"]
    choices = schema.get("enum", ()) if isinstance(found, str) else ()
    if meant := did_you_mean(str(found), map(str, choices)):
        return f"{text}{meant}"
    if detail["type"] == "string_type" and isinstance(found, (int, float)):
        return f'{text}; write it in quotes: "{found}"'
    if found is None:
        return f"{text}; fill it in or delete the line"
    return f"{text}; correct the value"


# Leaves that many sections have: written in one, they mean no other one's.
EVERYWHERE = ("name", "path")


def _suggest_key(model: type[Root], keys: Keys) -> str:
    """List the keys that are allowed at a place, and suggest a similar one there or elsewhere."""
    key, known = str(keys[-1]).lower().replace("-", "_"), known_keys(model, keys[:-1])
    if key in model.ABSENT:
        return f"{model.ABSENT[key]}; delete it"
    meant = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not meant and (len(keys) == 1 or key not in EVERYWHERE):
        meant = meant_keys(model, key, section=str(keys[0]))
    meant = meant or difflib.get_close_matches(key, known, n=1)
    text = f"allowed are {', '.join(known)}" if known else "allowed is a plain value"
    return f"{text}; did you mean `{'` or `'.join(meant)}`?" if meant else f"{text}; delete it"


def meant_keys(model: type[Root], name: str, *, section: str = "") -> list[str]:
    """Return at most two keys that a name without a section may mean; those in `section` come first."""
    name = name.lower().replace("-", "_")
    if name in model.OTHER_NAMES:
        return [model.OTHER_NAMES[name]]
    elsewhere = [path for path in all_paths(model) if path.rsplit(".", 1)[-1] == name]
    return [path for path in elsewhere if path.startswith(f"{section}.")][:2] or elsewhere[:2]
