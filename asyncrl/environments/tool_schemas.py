"""JSON schemas of tools from what the worker says of the user's functions, and the check of a call.

Transformers makes the schema, because chat templates were trained with its form. It reads a function, so it
gets an empty one with the name, docstring and types of the user's; only the worker has the user's.
"""

import ast
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Optional, Union

from asyncrl.environments.base import ToolCall
from asyncrl.errors import EnvironmentFault

TYPES: dict[str, Any] = {
    "int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "tuple": tuple,
    "Any": Any, "List": list, "Dict": dict, "Tuple": tuple, "None": None, "Optional": Optional,
    "Union": Union,
}  # fmt: skip
ALLOWED = "int, float, str, bool, list, dict, tuple, Any, Literal, Optional and Union"
_PYTHON: dict[str, Any] = {
    "integer": int, "number": (int, float), "string": str, "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip


class Toolbox:
    """The tools of an environment: their schemas, and the check of the model's calls."""

    def __init__(self, described: Sequence[Mapping[str, Any]]) -> None:
        """Make the schemas of what a worker described. Raises EnvironmentFault."""
        self.schemas = [tool_schema(tool) for tool in described]
        self._parameters = {one["function"]["name"]: one["function"]["parameters"] for one in self.schemas}

    def mistake(self, call: ToolCall) -> str:
        """Say what is wrong with a call, as text that the model reads; "" if nothing is."""
        if (parameters := self._parameters.get(call.name)) is None:
            return f"there is no tool {call.name}; the tools are {', '.join(self._parameters)}"
        if not isinstance(call.arguments, Mapping):
            return f"the arguments of {call.name} are not a JSON object"
        properties = parameters["properties"]
        for name in parameters.get("required", ()):
            if name not in call.arguments:
                return f"{call.name} needs the argument {name}"
        others = parameters.get("additionalProperties", False)
        for name, value in call.arguments.items():
            if name not in properties and others is False:
                return f"{call.name} has no argument {name}; it has {', '.join(properties) or 'none'}"
            if wrong := _wrong(value, properties.get(name, others)):
                return f"{name} must be {wrong}, got {json.dumps(value)[:80]}"
        return ""


def example(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that fit the parameters of a schema, for a trial."""
    required = parameters.get("required", ())
    return {name: _example(parameters["properties"].get(name, {})) for name in required}


def _example(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0])
    if "prefixItems" in schema:
        return [_example(one) for one in schema["prefixItems"]]
    kind = schema.get("type", "string")
    first = kind if isinstance(kind, str) else kind[0]
    if first == "array":
        return [_example(schema["items"])] if "items" in schema else []
    return {"integer": 1, "number": 0.5, "string": "text", "boolean": True, "object": {}}.get(first)


def tool_schema(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool as `describe_tool` describes it, or as it is. Raises EnvironmentFault."""
    is_schema = "function" in described
    schema: dict[str, Any] = dict(described) if is_schema else json.loads(_schema(json.dumps(described)))
    return schema


@lru_cache(maxsize=1024)
def _schema(text: str) -> str:
    from transformers.utils import get_json_schema  # it takes seconds, and only tools need it

    described = json.loads(text)
    place = f"{described['where']}: tool `{described['name']}`"
    parameters = [_parameter(one, place) for one in described["parameters"]]

    def stub() -> None: ...

    stub.__name__, stub.__doc__ = described["name"], described["doc"]
    stub.__annotations__ = {one.name: one.annotation for one in parameters}
    stub.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    try:
        return json.dumps(get_json_schema(stub))
    except Exception as error:  # for example, the docstring lacks the argument
        allowed = (
            "write a docstring with a section `Args:` that has a line `name: what it is` for each argument"
        )
        raise EnvironmentFault(f"{place}: {error}; {allowed}", reason="start") from error


def _parameter(described: Mapping[str, Any], place: str) -> inspect.Parameter:
    name, annotation = described["name"], described["annotation"]
    if not name.isidentifier():
        text = f"{place} takes `{name}`, which has no schema; name each argument"
        raise EnvironmentFault(text, reason="start")
    found = f"has the type `{annotation}`" if annotation else f"has no type; write for example `{name}: int`"
    try:
        kind = _type(ast.parse(annotation or "", mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        text = f"{place}: argument `{name}` {found}; allowed are {ALLOWED}"
        raise EnvironmentFault(text, reason="start") from error
    default = inspect.Parameter.empty if described["required"] else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _type(node: ast.expr) -> Any:
    """The type that an annotation names; nothing is evaluated. Raises ValueError."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_type(left), _type(right)]  # noqa: UP007 - the types are values here
        case ast.Subscript(value=ast.Name(id="Literal") | ast.Attribute(attr="Literal"), slice=choices):
            return Literal.__getitem__(ast.literal_eval(choices))
        case ast.Subscript(value=generic, slice=ast.Tuple(elts=elements)):
            return _type(generic)[tuple(_type(one) for one in elements)]
        case ast.Subscript(value=generic, slice=element):
            return _type(generic)[_type(element)]
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in TYPES:
            return TYPES[name]
    raise ValueError(ast.unparse(node))


def _wrong(value: Any, schema: Mapping[str, Any]) -> str:
    """What a value of this schema is, if `value` is not one; else "". What it does not know, it lets pass."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return ""
    if "anyOf" in schema:
        wrong = [_wrong(value, one) for one in schema["anyOf"]]
        return "" if "" in wrong else " or ".join(wrong)
    if "enum" in schema and not any(value == one and type(value) is type(one) for one in schema["enum"]):
        return f"one of {json.dumps(schema['enum'])}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    fits = [
        kind == "boolean" if isinstance(value, bool) else isinstance(value, _PYTHON.get(kind, object))
        for kind in kinds
    ]
    if kinds and not any(fits):
        return " or ".join(f"{'an' if kind[0] in 'aio' else 'a'} {kind}" for kind in kinds)
    return _wrong_inside(value, schema)


def _wrong_inside(value: Any, schema: Mapping[str, Any]) -> str:
    if isinstance(value, list):
        if "prefixItems" in schema and len(value) != len(schema["prefixItems"]):
            return f"an array of {len(schema['prefixItems'])} items"
        items = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        wrong = next(filter(None, map(_wrong, value, items)), "")
        return wrong and f"an array whose items are each {wrong}"
    if isinstance(value, Mapping) and "additionalProperties" in schema:
        each, named = schema["additionalProperties"], schema.get("properties") or {}
        others = (one for name, one in value.items() if name not in named)
        wrong = next((wrong for one in others if (wrong := _wrong(one, each))), "")
        return wrong and f"an object whose values are each {wrong}"
    return ""
