"""The pages for users of other libraries name keys and functions that exist, and their configs are right."""

import re
from pathlib import Path

import pytest
import yaml

from asyncrl.config import registry
from asyncrl.config.schema import Config

ROOT = Path(__file__).parents[2]
PAGES = ("coming-from-trl", "coming-from-verl")


def rows(page):
    for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[1] not in ("asyncrl", "---", ""):
            yield cells


def names(cell):
    return re.findall(r"`([^`]+)`", cell)


def is_key(name):
    model = Config
    for part in name.split("."):
        if not hasattr(model, "model_fields") or part not in model.model_fields:
            return False
        model = model.model_fields[part].annotation
    return True


@pytest.mark.parametrize("page", PAGES)
def test_every_key_exists(page):
    keys = {name for _, ours, _ in rows(page) for name in names(ours)}
    assert len(keys) > 25
    assert [name for name in keys if not is_key(name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_choice_exists_with_its_parameters(page):
    kinds = {
        "policy_loss": "policy_loss",
        "advantage": "advantage",
        "correction": "correction",
        "aggregation": "aggregation",
    }
    tried = 0
    for _, ours, text in rows(page):
        kind = kinds.get(ours.strip("`").removeprefix("algorithm."))
        for name, parameters in re.findall(r"\{name: ([\w-]+),([^}]*)\}", text):
            known = registry.parameters(kind, name).model_fields if kind else {}
            for parameter in re.findall(r"(\w+):", parameters):
                assert parameter in known, f"{page}: {name} has no parameter {parameter}"
                tried += 1
    assert tried > 5


@pytest.mark.parametrize("page", PAGES)
def test_the_config_is_valid(page):
    [text] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    assert Config.model_validate(yaml.safe_load(text)).batch.group_size == 8
