"""From the schema of a config: the table of every key in docs/config.md, and a JSON schema for editors.

The JSON schema says less than `asyncrl validate`: it knows keys, types, ranges and the parameters of
registered functions, not the rules between keys. Nothing in it is required except inside lists, since a file
may stand on top of others (`extends`).
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

from asyncrl.config import registry
from asyncrl.config.algorithm import ReferenceConfig
from asyncrl.config.base import Choice, Keys, Part
from asyncrl.config.checkpoint_section import HubConfig, StopConfig
from asyncrl.config.document import keys_of
from asyncrl.config.outline import all_paths, bound, kind_at, known_keys, schema_at
from asyncrl.config.schema import Config
from asyncrl.config.wording import describe

Schema = dict[str, Any]

REQUIRED = {"run.name", "model.path", "data.train", "data.train.path", "data.eval.path"}
REQUIRED |= {"reward.functions", "reward.functions.function"}
REQUIRED |= {"learner.stop_when.metric", "checkpoint.hub.repo"}
EXTENDS: Schema = {
    "description": "YAML files below this one, paths relative to it; this one wins.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
}
OWN: Schema = {"type": "string", "pattern": ":"}
"""A user's own function: `package.module:function` or `path.py:function`."""
ITEMS = ("RewardFunctionConfig", "DataSource", "EvalSet")
"""Sections in lists."""
SAME = {("critic", "optimizer"): ("learner", "optimizer"), ("data", "eval", 0): ("data", "train", 0)}
"""Sections whose keys are described in another one."""
HIDDEN = ("title", "stand_in", "resume")
"""What an editor has no use for."""


def json_schema() -> Schema:
    """JSON schema (draft 2020-12) of one YAML file."""
    schema = Config.model_json_schema()
    definitions: Schema = schema.pop("$defs")
    top = _bare("Config", schema)
    top["properties"] = {"extends": EXTENDS} | top["properties"]
    parts = {
        name: _bare(name, definition) for name, definition in definitions.items() if name != Choice.__name__
    }
    parts["OwnClass"] = {"anyOf": [OWN, _section({"name": OWN}, required=["name"], closed=False)]}
    parts["LearnerConfig"]["properties"]["hooks"]["items"] = {"$ref": "#/$defs/OwnClass"}
    paths = [keys_of(path) for path in all_paths(Config)]
    single = {keys: kind for keys in paths if (kind := kind_at(Config, keys))}
    listed = {(*keys, 0): kind for keys in paths if (kind := kind_at(Config, (*keys, 0)))}
    for keys, kind in (single | listed).items():
        in_list = keys in listed
        name = f"{kind}_item" if in_list and kind in single.values() else kind
        parts[name] = _choice(kind, in_list=in_list)
        target = _place(top, parts, keys)
        target["$ref"] = f"#/$defs/{name}"
        del target["kind"]
    # A text is short for the key of `named_by`.
    parts |= {name: {"anyOf": [{"type": "string"}, parts[name]]} for name in ITEMS}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "asyncrl run",
        **top,
        "$defs": parts,
    }


def _bare(name: str, schema: Schema) -> Schema:
    """Without titles, without defaults of whole sections, and with nothing required but in items of lists."""
    properties: Schema = {}
    for key, value in schema["properties"].items():
        is_section = "$ref" in value
        properties[key] = {
            word: what
            for word, what in value.items()
            if word not in HIDDEN and not (is_section and word == "default")
        }
    required = {"required": schema["required"]} if name in ITEMS else {}
    return (
        {"type": "object", "description": schema["description"], "properties": properties}
        | required
        | {"additionalProperties": False}
    )


def _place(top: Schema, parts: Schema, keys: Keys) -> Schema:
    """The schema at `keys`, to be changed."""
    section, place = top, top
    for key in keys:
        if key == 0:
            return place["items"]
        place = section["properties"][key]
        if "$ref" in place:
            section = parts.get(place["$ref"].rsplit("/", 1)[-1], {})
    return place


def _choice(kind: str, *, in_list: bool) -> Schema:
    """A name, or a section with a name and parameters. Outside lists the name may be missing: a file below
    this one has it."""
    options: list[Schema] = [
        {"enum": list(registry.names(kind))},
        OWN,
        _section({"name": OWN}, required=["name"], closed=False),
    ]
    every: dict[str, list[Schema]] = {}
    for name in registry.names(kind):
        schema = registry.parameters(kind, name).model_json_schema()
        values = {
            key: {word: what for word, what in value.items() if word != "title"}
            for key, value in schema["properties"].items()
        }
        options.append(
            _section({"name": {"const": name}} | values, required=["name", *schema.get("required", [])])
        )
        for key, value in values.items():
            if value not in every.setdefault(key, []):
                every[key].append(value)
    if not in_list:
        options.append(_section({key: {"anyOf": values} for key, values in every.items()}, required=[]))
    return {"description": f"A function of docs/algorithms.md ({kind}), or your own.", "anyOf": options}


def _section(properties: Schema, *, required: list[str], closed: bool = True) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": not closed,
    }


def tables() -> Iterator[str]:
    """A heading and a table for every section."""
    least = minimal()
    # A config with a teacher would need an advantage or a penalty that uses it.
    taught = least.algorithm.model_copy(update={"reference": ReferenceConfig()})
    # Without a value and a patience it would be refused.
    ends = least.learner.model_copy(update={"stop_when": StopConfig.model_construct(metric="eval/accuracy")})
    pushed = least.checkpoint.model_copy(update={"hub": HubConfig(repo="you/model")})
    shown = {"algorithm": taught, "learner": ends, "checkpoint": pushed}
    yield from _tables((), least.model_copy(update=shown))


def _tables(keys: Keys, part: Any) -> Iterator[str]:
    rows, below, same, twin = [], [], [], SAME.get(keys)
    other = functools.reduce(_at, twin, minimal()) if twin else None
    for key in known_keys(Config, keys):
        path, value = (*keys, key), getattr(part, key, None)
        if isinstance(value, Part) and not isinstance(value, Choice):
            below.append((path, value))
            continue
        if schema_at(Config, (*path, 0)).get("title") in ITEMS:
            below += [((*path, 0), value[0])] if value else []
            value = None
        cells = _cells(path, value)
        if twin and cells == _cells((*twin, key), getattr(other, key, ...)):
            same.append(f"`{_name(path)}`")
        else:
            rows.append(f"| `{_name(path)}` | {' | '.join(cells)} |")
    if rows:
        each = ", each item" if 0 in keys else ""
        heading = f"## `{_name(keys)}`{each}" if keys else "## Top level"
        yield from ["", heading, "", schema_at(Config, keys)["description"], ""]
        if twin:
            yield from [f"As in `{_name(twin)}`{each}: {', '.join(same)}.", ""]
        yield from ["| key | allowed | default | meaning |", "|---|---|---|---|", *rows]
    for path, value in below:
        yield from _tables(path, value)


def resumed() -> Iterator[str]:
    """A row for each reason why keys must not change when a run is resumed."""
    kept = {key: tuple(reason) for key, reason in bound(Config).items()}
    for key in known_keys(Config, ("data", "train", 0)):
        schema = schema_at(Config, ("data", "train", 0, key))
        if "resume" in schema:
            kept[f"data.train.{key}"] = tuple(schema["resume"])
    yield from ["| keys | a change is | because |", "|---|---|---|"]
    for kind, why in dict.fromkeys(kept.values()):
        keys = ", ".join(f"`{key}`" for key, reason in kept.items() if reason == (kind, why))
        yield f"| {keys} | {kind} | {why} |"


def _at(part: Any, key: str | int) -> Any:
    return part[key] if isinstance(key, int) else getattr(part, key)


def _name(path: Keys) -> str:
    return ".".join(str(key) for key in path if key != 0)


def _cells(path: Keys, value: Any) -> list[str]:
    """What is allowed, the default and the meaning."""
    name, schema = _name(path), schema_at(Config, path)
    allowed = _function(path) or describe({"anyOf": schema["anyOf"]} if "anyOf" in schema else schema)
    allowed = "a list of sections, see below" if name == "reward.functions" else allowed
    allowed = "text or a list of sections, see below" if name in ("data.train", "data.eval") else allowed
    if name.endswith((".train.reward", ".eval.reward")):
        allowed = "a list of sections, as `reward.functions`"
    if name.endswith((".train.environment", ".eval.environment")):
        allowed = "a section, as `environment`"
    allowed = in_short(allowed if value is not None else allowed.removesuffix(" or null"))
    default = "required" if name in REQUIRED else f"`{shown(value)}`"
    return [allowed, default, schema.get("description", "")]


def in_short(allowed: str) -> str:
    """What is allowed, with the standard names of the types."""
    text = allowed.replace("true or false", "boolean").replace("whole number", "integer")
    return re.sub(r"\b(a|one of) ", "", text)


def _function(path: Keys) -> str:
    kind, item_kind = kind_at(Config, path), kind_at(Config, (*path, 0))
    if path == ("learner", "hooks"):
        return "a list of your own classes ([hooks.md](hooks.md))"
    if not (kind or item_kind):
        return ""
    return ("" if kind else "list of ") + f"[function{'' if kind else 's'}](algorithms.md)"


def shown(value: Any) -> str:
    """A default as YAML has it, short: 1e-6, null, true."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Choice):
        return value.name
    if isinstance(value, tuple):
        return f"[{', '.join(shown(item) for item in value)}]"
    return re.sub(r"e([+-])0+", r"e\1", f"{value:g}") if isinstance(value, float) else str(value)


def minimal() -> Config:
    """The least that is a config, with the sections that are null by default."""
    functions = [{"function": "exact_match"}]
    return Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m", "lora": {}},
            "data": {"train": "t", "eval": "e"},
            "reward": {"functions": functions},
        }
    )
