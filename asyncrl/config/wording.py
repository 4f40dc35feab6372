"""Puts values, schemas and suggestions into words."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

Schema = Mapping[str, Any]

TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
}
SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def describe(schema: Schema) -> str:
    """Say what a schema allows."""
    match schema:
        case {"anyOf": choices}:
            return " or ".join(map(describe, choices))
        case {"enum": values}:
            return f"one of {', '.join(map(str, values))}"
        case {"const": value}:
            return str(value)
        case {"type": "object", "properties": properties}:
            return f"a section with {', '.join(properties)}"
        case {"type": "object", "additionalProperties": values}:
            return f"a map from text to {'any value' if values is True else describe(values)}"
        case {"type": "array", "prefixItems": items}:
            return f"a list of {len(items)}: {', '.join(map(describe, items))}"
        case {"type": "array"}:
            least = f"at least {schema['minItems']}: each " if "minItems" in schema else ""
            return f"a list of {least}{describe(schema.get('items', {}))}"
        case {"minimum": least, "maximum": most}:
            bounds = [f"from {least} to {most}"]
        case _:
            bounds = [f"{sign} {schema[key]}" for key, sign in SIGNS.items() if key in schema]
    such = [f"matching `{schema['pattern']}`"] if "pattern" in schema else []
    such = [f"such as {schema['examples'][0]}"] if "examples" in schema else such
    return " ".join([TYPES.get(schema.get("type", ""), "another value"), *bounds, *such])


def wanted(schema: Schema, error: str) -> str:
    """Say what a schema allows, in answer to an error of pydantic of this type; an empty one allows all."""
    text = describe(schema) if schema else "a number"
    return text.replace("a number", "a finite number") if error == "finite_number" else text


def shown(value: Any) -> str:
    """Show a value in at most 60 characters."""
    if isinstance(value, Mapping):
        return f"a section with {', '.join(map(str, value)) or 'nothing'}"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def divisors(number: int) -> list[int]:
    """Return the numbers that divide `number`, ascending, for a message that says what is allowed."""
    return [n for n in range(1, number + 1) if number % n == 0]


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", *, cutoff: float = 0.6) -> str:
    """Return the end of a message: the known word that is most similar, or `otherwise` if none is similar."""
    close = closest(word, known, cutoff=cutoff)
    advice = f"did you mean `{close}`?" if close else otherwise
    return f"; {advice}" if advice else ""


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known word that is most similar, whatever the case of its letters; empty if none is."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=cutoff)
    return names[close[0]] if close else ""
