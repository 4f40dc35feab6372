"""Rewrites what the documentation has from the code, the schema and the presets: `python docs/generate.py`.

Also docs/config.schema.json, a JSON schema for editors, and the store's users where a server's settings name
them.

Between `<!-- generated: KIND -->` and `<!-- end -->` stands a table. Of a table of functions only the column
`parameters` is written, from the signatures of the functions that its first column names; it has none if no
function has parameters. Other tables are written whole.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from config_reference import in_short, json_schema, minimal, resumed, shown, tables

from asyncrl.buffer.users import GENERATOR, LEARNER, generator_rules, learner_rules
from asyncrl.config import registry
from asyncrl.config.algorithm import ReferenceConfig
from asyncrl.config.base import Choice, Keys, Part
from asyncrl.config.load import load_config
from asyncrl.config.outline import kind_at
from asyncrl.config.schema import Config
from asyncrl.config.vllm_settings import REFUSED
from asyncrl.config.wording import describe

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "algorithms.md", ROOT / "docs" / "config.md")
SCHEMA = ROOT / "docs" / "config.schema.json"
USERS = {ROOT / "docs" / "security.md": "NAME", ROOT / "deploy" / "compose.yaml": "*"}
"""Files with a line for each user of a store, and the run's name there."""
USER = re.compile(rf"((?:ACL SETUSER|user) ({LEARNER}|{GENERATOR})(?: reset)? on >\S+) .*")
REGION = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
RUN = "run: {name: x}\nmodel: {path: m}\ndata: {train: t}\nreward: {functions: [{function: exact_match}]}\n"


def rewritten(page: str) -> str:
    """The page with every generated part as it should be."""

    def region(match: re.Match[str]) -> str:
        start, kind, table, end = match.groups()
        rows = {"presets": presets, "keys": tables, "resumed": resumed, "vllm": refused}.get(
            kind, lambda: with_parameters(kind, table.splitlines())
        )()
        return start + "\n".join(rows) + "\n" + end

    return REGION.sub(region, page)


def with_users(text: str, run: str) -> str:
    """The text with the rights of the store's users as they should be."""
    rules = {LEARNER: learner_rules(run), GENERATOR: generator_rules(run)}
    return USER.sub(lambda match: f"{match[1]} {rules[match[2]]}", text)


def schema_text() -> str:
    """docs/config.schema.json as it should be."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def with_parameters(kind: str, rows: list[str]) -> Iterator[str]:
    """The rows of a table of functions, their column `parameters` from the signatures. Every name of the kind
    has a row."""
    listed = [name for row in rows[2:] for name in re.findall(r"`([^`]+)`", cells(row)[0])]
    if sorted(listed) != sorted(registry.names(kind)):
        raise SystemExit(f"the table of {kind} lists {sorted(listed)}; registered are {registry.names(kind)}")
    found = [registry.parameters(kind, name).model_json_schema()["properties"] for name in listed]
    if not any(found):
        yield from rows
        return
    column = cells(rows[0]).index("parameters (default)")
    yield from rows[:2]
    for row, schemas in zip(rows[2:], found, strict=True):
        values = cells(row)
        values[column] = "; ".join(parameter(*item) for item in schemas.items())
        yield line(values)


def parameter(key: str, schema: Mapping[str, Any]) -> str:
    """Name, what is allowed, default. A default shows alone that any boolean or any number is allowed, and
    the page says once what every `level` allows."""
    allowed, default = in_short(describe(schema)), schema.get("default", "required")
    if default is None:
        allowed = allowed.removesuffix(" or null")
    if key == "level" or (allowed in ("boolean", "number") and "default" in schema and default is not None):
        allowed = ""
    allowed = allowed.removeprefix("number ").removeprefix("from ")
    return " ".join([f"`{key}`", *([allowed] if allowed else []), f"({shown(default)})"])


def refused() -> Iterator[str]:
    """One row per reason why arguments of vLLM's engine are refused. A reason that begins as another one
    refers to it."""
    yield "| refused | reason |"
    yield "|---|---|"
    reasons: dict[str, list[str]] = {}
    for name, why in REFUSED.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    for why, names in reasons.items():
        same = next((one for one in reasons if why.startswith((f"{one},", f"{one};"))), None)
        reason = why if same is None else f"as {reasons[same][0]}{why.removeprefix(same)}"
        yield line([", ".join(names), reason])


def presets() -> Iterator[str]:
    """One row per file of configs/algorithms."""
    yield "| preset | differs from the defaults in |"
    yield "|---|---|"
    told = minimal().algorithm.model_copy(update={"reference": ReferenceConfig()})
    plain = flat(minimal()) | flat(minimal().model_copy(update={"algorithm": told}))
    for path in sorted((ROOT / "configs" / "algorithms").glob("*.yaml")):
        own = {key: value for key, value in flat(load_preset(path)).items() if value != plain.get(key)}
        listed = "; ".join(f"{key.removeprefix('algorithm.')} {value}" for key, value in own.items())
        yield line([f"[`{path.stem}`](../configs/algorithms/{path.name})", listed])


def load_preset(path: Path) -> Config:
    """The config of a run that says nothing else."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run.yaml"
        run.write_text(f"extends: {path}\n{RUN}", encoding="utf-8")
        return load_config(run)


def flat(config: Config) -> dict[str, str]:
    """Dotted keys and values of what a preset may set."""
    found: dict[str, str] = {}

    def add(keys: Keys, value: Any) -> None:
        if isinstance(value, Choice):
            found[dotted(keys)] = choice(kind_at(Config, keys) or "", value)
        elif isinstance(value, Part):
            for key in type(value).model_fields:
                add((*keys, key), getattr(value, key))
        elif kind := kind_at(Config, (*keys, 0)):
            found[dotted(keys)] = ", ".join(choice(kind, item) for item in value)
        else:
            found[dotted(keys)] = shown(value)

    for part in ("algorithm", "batch", "critic"):
        add((part,), getattr(config, part))
    return found


def dotted(keys: Keys) -> str:
    """As a config's errors name a key."""
    return ".".join(map(str, keys))


def choice(kind: str, chosen: Choice) -> str:
    """Name, and the parameters that are not the default."""
    known = registry.parameters(kind, chosen.name).model_fields
    own = {key: value for key, value in chosen.params.items() if value != known[key].default}
    listed = ", ".join(f"{key} {shown(value)}" for key, value in own.items())
    return f"`{chosen.name}`" + (f" ({listed})" if listed else "")


def cells(row: str) -> list[str]:
    """Cells of a row of a Markdown table."""
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def line(values: list[str]) -> str:
    """A row of a Markdown table; nothing is shown as an empty cell."""
    return re.sub(r"\|  (?=\|)", "| ", "| " + " | ".join(values) + " |")


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
    for path, run in USERS.items():
        path.write_text(with_users(path.read_text(encoding="utf-8"), run), encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
