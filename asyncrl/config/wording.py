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


def describe(schema: Schema) -> str:
    """Say what a schema allows."""
    if "anyOf" in schema:
        return " or ".join(describe(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type")
    if kind == "object" and "properties" not in schema:
        values = schema["additionalProperties"]
        return f"a map from text to {'any value' if values is True else describe(values)}"
    if kind == "object":
        return f"a section with {', '.join(schema.get('properties', {}))}"
    if kind == "array":
        return _described_list(schema)
    words = [TYPES.get(str(kind), "another value"), *_bounds(schema)]
    if "examples" in schema:
        words.append(f"such as {schema['examples'][0]}")
    elif "pattern" in schema:
        words.append(f"matching `{schema['pattern']}`")
    return " ".join(words)


def wanted(schema: Schema, error: str) -> str:
    """Say what a schema allows, in answer to an error of pydantic of this type; an empty one allows all."""
    text = describe(schema) if schema else "a number"
    return text.replace("a number", "a finite number") if error == "finite_number" else text


def _bounds(schema: Schema) -> list[str]:
    if {"minimum", "maximum"} <= schema.keys():
        return [f"from {schema['minimum']} to {schema['maximum']}"]
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return [f"{sign} {schema[key]}" for key, sign in signs.items() if key in schema]


def _described_list(schema: Schema) -> str:
    if items := schema.get("prefixItems"):
        return f"a list of {len(items)}: {', '.join(map(describe, items))}"
    least = f"at least {schema['minItems']}: each " if "minItems" in schema else ""
    return f"a list of {least}{describe(schema.get('items', {}))}"


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
