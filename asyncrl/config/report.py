"""Problems of a config as text: what was found, what is allowed, which key was probably meant."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from asyncrl.config.base import Keys, Mistakes, Root
from asyncrl.config.document import Node, Problem, placed
from asyncrl.config.outline import all_paths, known_keys, schema_at
from asyncrl.config.wording import Schema, describe, did_you_mean, shown


def panel(problems: Iterable[Problem | str], *, title: str) -> str:
    """List all problems, one per line, under a title with their number."""
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return "\n".join([f"{count} in {title}", *(f"  {line}" for line in lines)])


def problems_of(model: type[Root], error: ValidationError, root: Node) -> list[Problem]:
    """Convert pydantic's errors to problems with places."""
    return [problem for detail in error.errors() for problem in _problems_of(model, detail, root)]


def _problems_of(model: type[Root], detail: Any, root: Node) -> list[Problem]:
    keys: Keys = tuple(detail["loc"])
    place, schema = root.nearest(keys).place, schema_at(model, keys)
    match detail["type"]:
        case "too_short" if detail["input"]:
            return []  # A wrong item leaves the list short; the item is reported.
        case "extra_forbidden":
            return [Problem(place, keys, f"found an unknown key; {suggest_key(model, keys)}", misplaced=True)]
        case "missing" if keys[:-1] and root.nearest(keys[:-1]).plain() is None:
            return []  # The section itself is reported.
        case "missing":
            description = str(schema.get("description", "")).partition(". ")[0].rstrip(".")
            needed = description or describe(schema) or "a value"
            return [Problem(place, keys, f"found nothing; it is needed: {needed}; add `{keys[-1]}: ...`")]
        case "value_error":
            error = detail["ctx"]["error"]
            if isinstance(error, Mistakes):
                return [placed(mistake, root) for mistake in error.mistakes]
            return [Problem(place, keys, str(error))]
    text = f"found {shown(detail['input'])}; {_allowed(schema, detail)}"
    return [Problem(place, keys, text, replaced=True)]


def _allowed(schema: Schema, detail: Any) -> str:
    text = f"allowed is {describe(schema)}"
    found = detail["input"]
    choices = schema.get("enum", ()) if isinstance(found, str) else ()
    if meant := did_you_mean(str(found), map(str, choices)):
        return f"{text}{meant}"
    if detail["type"] == "string_type" and isinstance(found, (int, float)):
        return f'{text}; write it in quotes: "{found}"'
    if found is None:
        return f"{text}; fill it in or delete the line"
    return f"{text}; correct the value"


def suggest_key(model: type[Root], keys: Keys) -> str:
    """List the keys that are allowed at a place, and suggest a similar one there or elsewhere."""
    key, known = str(keys[-1]).lower().replace("-", "_"), known_keys(model, keys[:-1])
    if key in model.ABSENT:
        return f"{model.ABSENT[key]}; delete it"
    meant = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    meant = (
        meant or meant_keys(model, key, section=str(keys[0])) or difflib.get_close_matches(key, known, n=1)
    )
    text = f"allowed are {', '.join(known)}" if known else "allowed is a plain value"
    return f"{text}; did you mean `{'` or `'.join(meant)}`?" if meant else f"{text}; delete it"


def meant_keys(model: type[Root], name: str, *, section: str = "") -> list[str]:
    """Return at most two keys that a name without a section may mean; those in `section` come first."""
    name = name.lower().replace("-", "_")
    if name in model.OTHER_NAMES:
        return [model.OTHER_NAMES[name]]
    elsewhere = [path for path in all_paths(model) if path.rsplit(".", 1)[-1] == name]
    return [path for path in elsewhere if path.startswith(f"{section}.")][:2] or elsewhere[:2]
