"""Methods of a class from the tools of a server, whose parameters are JSON schemas."""

import re
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

TYPES = {
    "string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list",
    "object": "dict",
}  # fmt: skip


class ToolError(Exception):
    """A tool of a server failed."""


def as_method(
    body: Callable[..., Any], name: str, description: str | None, schema: Mapping[str, Any]
) -> Callable[..., Any]:
    """Give `body(self, **arguments)` the name, text and parameters of a tool, and return it."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    body.__name__ = body.__qualname__ = name
    said = {key: " ".join(str(one.get("description") or key).split()) for key, one in properties.items()}
    own_text = re.split(r"\n\s*Args:", description or name)[0].rstrip()
    body.__doc__ = "\n".join(
        [own_text, "", *(["Args:"] if said else []), *(f"    {key}: {text}" for key, text in said.items())]
    )
    parameters = [
        Parameter(
            key,
            Parameter.KEYWORD_ONLY,
            annotation=_annotation(one),
            default=Parameter.empty if key in required else one.get("default"),
        )
        for key, one in properties.items()
    ]
    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    body.__signature__ = Signature([own, *parameters])  # type: ignore[attr-defined]
    return body


def _annotation(schema: Mapping[str, Any]) -> str:
    """The type of a JSON schema as an annotation."""
    if "enum" in schema:
        return f"Literal[{', '.join(map(repr, schema['enum']))}]"
    if "anyOf" in schema:
        kinds = [one for one in schema["anyOf"] if one.get("type") != "null"]
        inner = " | ".join(_annotation(one) for one in kinds)
        return inner if len(kinds) == len(schema["anyOf"]) else f"{inner} | None"
    kind = TYPES.get(schema.get("type", ""), "Any")
    if kind == "list" and "items" in schema:
        return f"list[{_annotation(schema['items'])}]"
    return kind
