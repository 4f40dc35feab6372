"""A config of another shape than a run's is read, overridden, judged and resumed by the same functions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import jsonschema
import pytest
from pydantic import Field

from asyncrl.algo.ranges import Positive, PositiveInt
from asyncrl.config.base import OTHER_RUN, REFUSED, Choice, Mistake, Part, Root, marked
from asyncrl.config.load import load, read_draft
from asyncrl.config.outline import (
    all_paths,
    bound,
    default_name,
    kept_values,
    kind_at,
    known_keys,
    resume_findings,
)
from asyncrl.config.resolved import config_json, dump_config
from asyncrl.errors import ConfigError


class Kiln(Part):
    """An oven."""

    fuel: Annotated[str, marked(stand_in="none", resume=(OTHER_RUN, "every glaze was mixed for it"))]
    """What is burnt."""
    degrees: PositiveInt = 900
    """Temperature of the oven."""
    shelves: Annotated[tuple[PositiveInt, ...], marked(resume=(REFUSED, "pots stand on them"))] = (3, 4)
    """Pots of each shelf."""


class Glaze(Part):
    """A coating."""

    recipe: Annotated[Choice, marked(kind="policy_loss")] = Choice(name="cispo")
    """Function that mixes it."""
    sieves: tuple[Annotated[Choice, marked(kind="filter")], ...] = ()
    """Functions that refuse lumps."""
    finish: Literal["matte", "glossy"] = "matte"
    """Look."""


class Potter(Part):
    """A person at a wheel."""

    hours: Positive = 8.0
    """Hours of a day."""
    tools: tuple[str, ...] = ()
    """Names of tools."""


class Helper(Part):
    """A second person."""

    pay: Annotated[PositiveInt, marked(resume=(REFUSED, "it was agreed upon"))] = 10
    """Pay of an hour."""


def _the_fire_is_hot_enough(pottery: "Pottery") -> Iterator[Mistake]:
    kiln, glaze = pottery.kiln, pottery.glaze
    if glaze.finish == "glossy" and kiln.degrees < 1200:
        text = f"kiln.degrees is {kiln.degrees}, but glaze.finish is glossy; set it to 1200 or more"
        yield Mistake(("kiln.degrees", "glaze.finish"), text)


class Pottery(Root):
    """A workshop: required and optional sections, a list and a map of sections, and a key without section."""

    RULES = (_the_fire_is_hot_enough,)
    OTHER_NAMES: ClassVar = {"heat": "kiln.degrees"}
    ABSENT: ClassVar = {"plastic": "pots are made of clay"}

    kiln: Kiln
    glaze: Glaze = Glaze()
    helper: Helper | None = None
    potters: tuple[Potter, ...] = ()
    """People of the workshop."""
    branches: dict[str, Kiln] = Field(default_factory=dict)
    """Ovens elsewhere, by place."""
    motto: str = ""
    """Text above the door."""


def written(directory: Path, **texts: str) -> Path:
    """Write YAML files, and return the path of the last one."""
    for name, text in texts.items():
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")
    return directory / f"{[*texts][-1]}.yaml"


BASE = """\
kiln: {fuel: wood}
glaze:
  recipe: {name: ppo_clip, clip_low: 0.1}
  sieves: [{name: reward_range, low: 0.1, high: 0.9}]
potters: [{hours: 4}, {tools: [knife]}]
branches: {north: {fuel: gas, degrees: 1000}}
"""


def test_files_and_overrides_are_merged_and_written_back(tmp_path):
    path = written(tmp_path, base=BASE, own="extends: base.yaml\nglaze: {recipe: cispo}\nhelper: {pay: 12}\n")
    overrides = [
        "potters.0.hours=6",
        "glaze.sieves.0=zero_variance",
        "branches.north.degrees=1100",
        "motto=Clay",
    ]
    found = load(Pottery, path, overrides)
    # The parameters of the old functions are gone, those of the old sections are not.
    assert (found.glaze.recipe, found.glaze.sieves) == (Choice(name="cispo"), (Choice(name="zero_variance"),))
    assert [potter.hours for potter in found.potters] == [6.0, 8.0] and found.potters[1].tools == ("knife",)
    assert found.branches == {"north": Kiln(fuel="gas", degrees=1100)} and found.motto == "Clay"
    assert found.helper == Helper(pay=12) and found.kiln.fuel == "wood"
    again = load(Pottery, written(tmp_path, again=dump_config(found)))
    assert again == found and config_json(again) == config_json(found)
    with_default_name = load(
        Pottery, written(tmp_path, short="kiln: {fuel: wood}\nglaze: {recipe: {clip_high: 4}}\n")
    )
    assert with_default_name.glaze.recipe == Choice.model_validate({"name": "cispo", "clip_high": 4})


def test_every_mistake_is_told_with_its_line_and_what_was_meant(tmp_path):
    path = written(
        tmp_path,
        wrong="""\
kiln: {degres: 900, degrees: 950}
glaze:
  recipe: {name: cispo, clip_hihg: 2}
  sieves: [zero_varianse]
  finish: glosy
helper:
  pey: 3
potters:
  - hours: true
  - {hour: 3}
branches:
  north:
    degrees: none
    fule: gas
moto: clay
heat: 3
plastic: 1
""",
    )
    with pytest.raises(ConfigError) as caught:
        load(Pottery, path, ["kiln.shelves.5=1", "glaze.finish=glossy"])
    title, *lines = str(caught.value).splitlines()
    lines = [line.strip().removeprefix(f"{path}:") for line in lines]
    assert title == f"{len(lines)} problems in {path}"
    expected = [
        "1  kiln.degres: found an unknown key; allowed are fuel, degrees, shelves; did you mean `degrees`?",
        "1  kiln.fuel: found nothing; it is needed: What is burnt; add `fuel: ...`",
        "3  glaze.recipe.clip_hihg: policy_loss `cispo` has no parameter `clip_hihg`; did you mean `clip_high`?",
        "4  glaze.sieves.0.name: unknown filter `zero_varianse`; did you mean `zero_variance`? Your own is "
        "`package.module:function`",
        "7  helper.pey: found an unknown key; allowed are pay; did you mean `pay`?",
        "9  potters.0.hours: found true; allowed is a number > 0; correct the value",
        "10  potters.1.hour: found an unknown key; allowed are hours, tools; did you mean `hours`?",
        "12  branches.north.fuel: found nothing; it is needed: What is burnt; add `fuel: ...`",
        "13  branches.north.degrees: found 'none'; allowed is a whole number >= 1; correct the value",
        "14  branches.north.fule: found an unknown key; allowed are fuel, degrees, shelves; did you mean `fuel`?",
        "15  moto: found an unknown key; allowed are kiln, glaze, helper, potters, branches, motto; did you "
        "mean `motto`?",
        "16  heat: found an unknown key; allowed are kiln, glaze, helper, potters, branches, motto; did you "
        "mean `kiln.degrees`?",
        "17  plastic: found an unknown key; pots are made of clay; delete it",
        "override `kiln.shelves.5=1`  kiln.shelves.5: found no such item; allowed is the whole list",
    ]
    assert sorted(lines) == sorted(expected)


def test_rules_between_sections_are_judged_although_a_key_is_missing(tmp_path):
    path = written(tmp_path, hot="kiln: {}\nglaze:\n  finish: glossy\n")
    with pytest.raises(ConfigError) as caught:
        load(Pottery, path)
    assert "kiln.fuel: found nothing" in str(caught.value)
    assert f"{path}:3  glaze.finish: kiln.degrees is 900, but glaze.finish is glossy" in str(caught.value)
    draft = read_draft(Pottery, path)
    assert draft.config and draft.config.kiln.fuel == "none", "the stand-in"
    with pytest.raises(ConfigError, match="motto: found nothing; allowed is text"):
        load(Pottery, path, ["motto=null"])
    assert load(Pottery, path, ["kiln={fuel: gas, degrees: 1200}"]).kiln.degrees == 1200


def test_the_schema_says_what_the_program_accepts(tmp_path):
    schema = Pottery.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    editor = jsonschema.Draft202012Validator(schema)
    editor.validate(json.loads(config_json(load(Pottery, written(tmp_path, base=BASE)))))
    assert not editor.is_valid({"kiln": {"fuel": "gas", "degrees": 0}})
    assert {"kiln.fuel", "glaze.recipe", "glaze.sieves", "helper.pay", "motto"} < set(all_paths(Pottery))
    assert known_keys(Pottery, ("helper",)) == ["pay"] and known_keys(Pottery, ("branches", "x")) == [
        *Kiln.model_fields
    ]
    assert kind_at(Pottery, ("glaze", "recipe")) == "policy_loss"
    assert kind_at(Pottery, ("glaze", "sieves", 3)) == "filter"
    assert default_name(Pottery, ("glaze", "recipe")) == "cispo"


def test_a_resumed_one_keeps_what_its_fields_say(tmp_path):
    path = written(tmp_path, base=BASE)
    assert set(bound(Pottery)) == {"kiln.fuel", "kiln.shelves", "helper.pay"}
    assert [*bound(Pottery)["kiln.fuel"]] == [OTHER_RUN, "every glaze was mixed for it"]
    saved = json.loads(json.dumps(kept_values(load(Pottery, path))))
    assert saved == {"kiln.fuel": "wood", "kiln.shelves": [3, 4], "helper.pay": None}

    def findings(*overrides: str) -> dict[str, str]:
        values = kept_values(load(Pottery, path, overrides))
        found = resume_findings(Pottery, saved, values, weights="newest")
        return {mistake.keys[0]: mistake.text for mistake in found}

    assert findings("kiln.degrees=1000", "motto=other", "glaze.recipe=sapo") == {}
    changed = findings("kiln.fuel=gas", "kiln.shelves=[3]", "helper.pay=11")
    assert changed.keys() == bound(Pottery).keys()
    assert changed["kiln.fuel"].startswith(
        "found 'gas'; allowed is 'wood', with which this run was begun: every glaze was mixed for it; set it back"
    )
    assert "model.path=newest" in changed["kiln.shelves"]
