"""What a model of a config says of its keys: their JSON schemas, with the marks of `base.marked`.

Among these is which keys may change when a run is resumed, and why the others may not. A checkpoint holds the
values of those, which are compared with the config before anything is written or started.

Groups that were sampled before a change are trained as they are. If they no longer fit (too long, too old,
without the greedy reward), they are rejected, counted with the reason, and their credit is returned.
"""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.base import REFUSED, Keys, Mistake, Part
from asyncrl.config.wording import Schema, shown


@functools.cache
def schema_at(model: type[Part], keys: Keys) -> Schema:
    """Return the JSON schema of the value at `keys`, or an empty one if there is none."""
    if not keys:
        schema = model.model_json_schema()
        return dict(_inlined(schema, schema.get("$defs", {})))
    above, key = schema_at(model, keys[:-1]), keys[-1]
    for option in above.get("anyOf", [above]):
        if isinstance(key, int):
            items = option.get("prefixItems", [])
            found = items[key] if key < len(items) else option.get("items")
        else:
            found = option.get("properties", {}).get(key, option.get("additionalProperties"))
        if isinstance(found, Mapping):
            return found
    return {}


def _inlined(schema: Any, parts: Schema) -> Any:
    """Return the schema with every reference replaced by its target."""
    if isinstance(schema, list):
        return [_inlined(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    referred = parts[schema["$ref"].rsplit("/", 1)[-1]] if "$ref" in schema else {}
    merged = {**referred, **schema}
    return {key: _inlined(value, parts) for key, value in merged.items() if key not in ("$ref", "$defs")}


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


def bound(model: type[Part]) -> dict[str, tuple[str, str]]:
    """Return the keys that must not change, with the kind of the reason and the reason."""
    schemas = {path: schema_at(model, tuple(path.split("."))) for path in all_paths(model)}
    return {path: schema["resume"] for path, schema in schemas.items() if "resume" in schema}


def kept_values(config: Part) -> dict[str, Any]:
    """Return the values of the keys that must not change, as JSON has them; None in a section left out."""
    values: Any = config.model_dump(mode="json")
    return {
        key: functools.reduce(lambda part, name: (part or {}).get(name), key.split("."), values)
        for key in bound(type(config))
    }


def resume_findings(
    model: type[Part], saved: Mapping[str, Any], values: Mapping[str, Any], *, weights: str
) -> Iterator[Mistake]:
    """Find every bound key that `values` changes. `weights` names the directory of the run's newest model."""
    for key, (kind, why) in bound(model).items():
        new = values[key]
        old = saved.get(key, new)  # an earlier release did not record every key
        # Two spellings of one path are the same model.
        if old == new or (
            key == "model.path" and Path(old).exists() and Path(new).exists() and Path(old).samefile(new)
        ):
            continue
        cure = "begin another run (another run.name; or --fresh, which deletes this one)"
        if kind == REFUSED:
            cure = f"begin another run from its weights (another run.name, and model.path={weights})"
        allowed = f"{shown(old)}, with which this run was begun: {why}"
        yield Mistake((key,), f"found {shown(new)}; allowed is {allowed}; set it back, or {cure}")
