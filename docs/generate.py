"""Rewrites what the documentation has from the code, the schema and the presets: `python docs/generate.py`.

Also docs/config.schema.json, a JSON schema for editors, and the store's users where a server's settings name
them.

Between `<!-- generated: KIND -->` and `<!-- end -->` stands a table. Of a table with a column `parameters`
that column alone is written, from the signatures of the functions that its first column names; other tables
are written whole.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from config_reference import json_schema, minimal, resumed, shown, tables

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
CHOSEN = ("advantage", "policy_loss", "correction", "aggregation")


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
    head = cells(rows[0])
    column = head.index("parameters (default)")
    listed = [name for row in rows[2:] for name in re.findall(r"`([^`]+)`", cells(row)[0])]
    if sorted(listed) != sorted(registry.names(kind)):
        raise SystemExit(f"the table of {kind} lists {sorted(listed)}; registered are {registry.names(kind)}")
    yield from rows[:2]
    for row in rows[2:]:
        values = cells(row)
        name = re.findall(r"`([^`]+)`", values[0])[0]
        values[column] = "; ".join(
            parameter(*item)
            for item in registry.parameters(kind, name).model_json_schema()["properties"].items()
        )
        yield line(values)


def parameter(key: str, schema: Mapping[str, Any]) -> str:
    """Name, what is allowed, default."""
    allowed = describe(schema).removeprefix("a number ").removeprefix("one of ")
    if schema.get("default", ...) is None:
        allowed = allowed.removesuffix(" or null")
    return f"`{key}` {allowed} ({shown(schema['default']) if 'default' in schema else 'required'})"


def refused() -> Iterator[str]:
    """One row per reason why arguments of vLLM's engine are refused."""
    yield "| refused | reason |"
    yield "|---|---|"
    for reason in dict.fromkeys(REFUSED.values()):
        names = ", ".join(f"`{name}`" for name, why in REFUSED.items() if why == reason)
        yield line([names, reason])


def presets() -> Iterator[str]:
    """One row per file of configs/algorithms."""
    yield "| preset | advantage | policy loss | correction | aggregation | further |"
    yield "|---|---|---|---|---|---|"
    plain = flat(minimal())
    told = minimal().algorithm.model_copy(update={"reference": ReferenceConfig()})
    plain |= flat(minimal().model_copy(update={"algorithm": told}))
    for path in sorted((ROOT / "configs" / "algorithms").glob("*.yaml")):
        config = load_preset(path)
        own = {key: value for key, value in flat(config).items() if value != plain.get(key)}
        further = "; ".join(f"{key.removeprefix('algorithm.')} {value}" for key, value in own.items())
        chosen = [choice(kind, getattr(config.algorithm, kind)) for kind in CHOSEN]
        yield line([f"[`{path.stem}`](../configs/algorithms/{path.name})", *chosen, further])


def load_preset(path: Path) -> Config:
    """The config of a run that says nothing else."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run.yaml"
        run.write_text(f"extends: {path}\n{RUN}", encoding="utf-8")
        return load_config(run)


def flat(config: Config) -> dict[str, str]:
    """Dotted keys and values of what a preset may set beside the four choices."""
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
    return {key: value for key, value in found.items() if key.removeprefix("algorithm.") not in CHOSEN}


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
