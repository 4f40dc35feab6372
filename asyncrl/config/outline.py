"""What a model of a config says of its keys: their JSON schemas, with the marks of `base.marked`."""

import functools
from collections.abc import Mapping
from typing import Any

from asyncrl.config.base import Keys, Part
from asyncrl.config.wording import Schema


@functools.cache
def _json_schema(model: type[Part]) -> Schema:
    schema = model.model_json_schema()
    return dict(_inlined(schema, schema.get("$defs", {})))


def _inlined(schema: Any, parts: Schema) -> Any:
    """Return the schema with every reference replaced by its target."""
    if isinstance(schema, list):
        return [_inlined(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    referred = parts[schema["$ref"].rsplit("/", 1)[-1]] if "$ref" in schema else {}
    merged = {**referred, **schema}
    return {key: _inlined(value, parts) for key, value in merged.items() if key not in ("$ref", "$defs")}


def schema_at(model: type[Part], keys: Keys) -> Schema:
    """Return the JSON schema of the value at `keys`, or an empty one if there is none."""
    schema = _json_schema(model)
    for key in keys:
        found = (_below(option, key) for option in schema.get("anyOf", [schema]))
        schema = next((one for one in found if isinstance(one, Mapping)), {})
    return schema


def _below(schema: Schema, key: str | int) -> Any:
    if isinstance(key, int):
        items = schema.get("prefixItems", [])
        return items[key] if key < len(items) else schema.get("items")
    return schema.get("properties", {}).get(key, schema.get("additionalProperties"))


def known_keys(model: type[Part], keys: Keys) -> list[str]:
    """Return the keys of the section at `keys`, which may be optional."""
    schema = schema_at(model, keys)
    return [key for option in schema.get("anyOf", [schema]) for key in option.get("properties", {})]


@functools.cache
def all_paths(model: type[Part], keys: Keys = ()) -> tuple[str, ...]:
    """Return every dotted key of a model, except those inside choices and lists."""
    below = () if kind_at(model, keys) else known_keys(model, keys)
    paths = [path for key in below for path in all_paths(model, (*keys, key))]
    return (*([".".join(map(str, keys))] if keys else []), *paths)


def kind_at(model: type[Part], keys: Keys) -> str | None:
    """Return the kind of function that is chosen at `keys`, or None."""
    return schema_at(model, keys).get("kind")


def named_by(model: type[Part], keys: Keys) -> str | None:
    """Return the key of the section at `keys` that a text in place of the section means, or None."""
    schema = schema_at(model, keys)
    found = "name" if "kind" in schema else schema.get("named_by")
    return None if found is None else str(found)


def default_name(model: type[Part], keys: Keys) -> str | None:
    """Return the name of the function that is chosen at `keys` by default; None for items of lists."""
    schema = schema_at(model, keys)
    return schema["default"]["name"] if "kind" in schema and "default" in schema else None
