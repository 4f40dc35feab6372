"""The JSON schema for editors accepts what the program accepts, as far as it can, and marks the rest."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from asyncrl.config import registry
from asyncrl.config.document import parse
from asyncrl.config.load import load_config
from asyncrl.config.outline import all_paths, schema_at
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

ROOT = Path(__file__).parents[2]
# Those of stages have another schema.
SHIPPED = sorted(set((ROOT / "configs").rglob("*.yaml")) - set((ROOT / "configs" / "stages").iterdir()))
SCHEMA = json.loads((ROOT / "docs" / "config.schema.json").read_text(encoding="utf-8"))
EDITOR = jsonschema.Draft202012Validator(SCHEMA)
MINIMAL = (
    "run: {name: x}\nmodel: {path: m}\ndata: {train: t}\nreward: {functions: [{function: exact_match}]}\n"
)


def plain(text: str) -> Any:
    """As the program reads YAML."""
    root, problems = parse(text, file="x")
    assert not problems
    return root.plain()


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_name_the_schema(path):
    text = path.read_text(encoding="utf-8")
    EDITOR.validate(plain(text))
    (target,) = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", text, re.MULTILINE)
    assert (path.parent / target).resolve() == ROOT / "docs" / "config.schema.json"


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: {advantage: rloo, filters: [zero_variance, {name: reward_range, low: 0.1, high: 0.9}]}",
        "algorithm: {correction: {cap: 3.0}}",  # of the function set below, or of the default
        "algorithm: {policy_loss: 'mine.py:loss', kl: {coefficient: 0.1, estimator: {name: 'pkg.mod:kl', strength: 2}}}",
        "learner: {hooks: ['mine.py:Hook', {name: 'mine.py:Hook', every: 3}], optimizer: {lr: 1e-6}}",
        "extends: [gsm8k.yaml, algorithms/dapo.yaml]",
        "data: {eval: null}",
        "data: {train: [a, {path: b, reward: [math]}], eval: [c]}\nreward: {functions: [exact_match]}",
    ],
)
def test_what_the_program_accepts_is_not_marked(text, tmp_path):
    EDITOR.validate(plain(text))
    if "extends" not in text:
        (tmp_path / "run.yaml").write_text(f"extends: base.yaml\n{text}")
        (tmp_path / "base.yaml").write_text(MINIMAL)
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "batch: {group: 8}",
        "bacth: {groups: 8}",
        "batch: {groups: 0}",
        "batch: {groups: many}",
        "learner: {zero_stage: 4}",
        "learner: {device: gpu}",
        "run: {name: 'a b'}",
        "algorithm: {advantage: grop}",
        "algorithm: {advantage: {name: rloo, scale: none}}",
        "algorithm: {correction: {name: truncate, cap: -1}}",
        "algorithm: {correction: {kap: 2.0}}",
        "algorithm: {shaping: [soft_overlog]}",
        "algorithm: {filters: [{low: 0.1, high: 0.9}]}",
        "algorithm: {filters: [{name: reward_range, low: 0.1}]}",
        "reward: {functions: [{weight: 1.0}]}",
        "learner: {optimizer: {betas: [0.9]}}",
        "generator: {gpu_memory_utilization: 1.5}",
    ],
)
def test_planted_mistakes_are_marked_by_both(text, tmp_path):
    assert not EDITOR.is_valid(plain(text))
    (tmp_path / "run.yaml").write_text(f"extends: base.yaml\n{text}")
    (tmp_path / "base.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "run.yaml")


VALUES = [
    None,
    True,
    False,
    -1,
    0,
    0.5,
    1,
    1.5,
    2,
    7,
    "none",
    "group",
    "token",
    "text",
    [],
    {},
    {"a": 1.0},
    {"a": "b"},
]


@pytest.mark.parametrize("kind", registry.KINDS)
def test_parameters_are_judged_as_the_registry_judges_them(kind):
    for name in registry.names(kind):
        for key, schema in registry.parameters(kind, name).model_json_schema()["properties"].items():
            editor = jsonschema.Draft202012Validator(schema)

            def accepts(value, kind=kind, name=name, key=key):
                return not any(
                    f": `{key}` is" in found.text and "it must be" in found.text
                    for found in registry.mistakes(kind, name, {key: value})
                )

            # YAML's 1.0 is an integer to a JSON schema; no value here is one of both.
            judged = {str(value): (editor.is_valid(value), accepts(value)) for value in VALUES}
            assert all(ours == theirs for ours, theirs in judged.values()), f"{kind} {name} {key}: {judged}"


def test_every_key_has_a_meaning_and_stands_in_the_reference():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    for path in all_paths(Config):
        schema = schema_at(Config, tuple(path.split(".")))
        assert schema.get("description"), f"{path} has no docstring in the schema"
        assert f"`{path}`" in page, path


def test_a_default_of_null_is_told_as_null():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `([\w.]+)` \| .*? \| (`[^`]*`|required) \|", page, re.MULTILINE))
    absent = {path for path in told if schema_at(Config, tuple(path.split("."))).get("default", 0) is None}
    assert "algorithm.reference.path" in absent and {told[path] for path in absent} == {"`null`"}
