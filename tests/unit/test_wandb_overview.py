"""The overview for W&B as it would be saved, without a network: its charts are those of our own page, and
their metrics exist."""

import json
import re
import runpy
import sys

import pytest
from wandb_workspaces.reports.v2 import interface

from asyncrl.results.charts import CURVES, STALENESS
from asyncrl.telemetry.history import of_sets
from tests.support.pages import ROOT, text_of

SCRIPT = ROOT / "deploy" / "wandb_overview.py"
overview = runpy.run_path(str(SCRIPT))["overview"]


@pytest.fixture
def asked(monkeypatch):
    """W&B's two answers: it knows the project, and keeps what is saved."""
    asked = []

    def answer(api, query, variables):
        asked.append(variables)
        return {
            "project": {"internalId": "77"},
            "upsertView": {"view": {"id": "8", "name": "x"}, "inserted": True},
        }

    monkeypatch.setattr(interface, "_get_api", lambda: None)
    monkeypatch.setattr(interface, "execute_graphql", answer)
    return asked


def grids(run):
    """(heading, run sets, panels) as W&B gets them."""
    blocks = (
        overview("me", "asyncrl", run)._to_model().spec.model_dump(by_alias=True, exclude_none=True)["blocks"]
    )
    headings = [block["children"][0]["text"] for block in blocks if block["type"] == "heading"]
    found = [block["metadata"] for block in blocks if block["type"] == "panel-grid"]
    return [
        (heading, grid["runSets"], grid["panelBankSectionConfig"]["panels"])
        for heading, grid in zip(headings, found, strict=True)
    ]


def matches(config, name):
    return name in config["metrics"] or bool(
        config.get("useMetricRegex") and re.search(config["metricRegex"], name)
    )


def test_it_has_the_charts_of_our_page_by_our_own_step(asked):
    charts = {
        panel["config"]["chartTitle"]: panel["config"] for _, _, panels in grids(None)[:3] for panel in panels
    }
    for curve in (*CURVES, *STALENESS):
        config = charts[curve.title]
        assert config["xAxis"] == "step" and config.get("yLogScale", False) == curve.log
        for name in curve.names:
            assert matches(config, name.replace("*", "judge")), (curve.title, name)
        assert not matches(config, "reward/mean") or curve.title == "Reward"
        assert not matches(config, "policy/entropy/more") and not matches(config, "eval/passing")


def test_a_chart_has_the_same_metrics_of_named_sets_as_on_our_page(asked):
    charts = {
        panel["config"]["chartTitle"]: panel["config"] for _, _, panels in grids(None)[:3] for panel in panels
    }
    metrics = ("accuracy", "reward_mean", "pass@8", "maj@4", "best@8", "length_mean", "prompts")
    sets = ("", "math/", "math-se/", "s/", "e/", "es/", "sx/", "xe/", "sea/", "a.b/", "se/", "math/se/")
    names = [f"eval/{of_set}{metric}" for of_set in sets for metric in metrics]
    for curve in CURVES:
        shown = {name for wanted in curve.names for name in of_sets(wanted, names)}
        assert {name for name in names if matches(charts[curve.title], name)} == shown, curve.title


def test_every_metric_that_it_names_is_one_of_ours(asked):
    explained = text_of(ROOT / "docs" / "metrics.md")
    for _, _, panels in grids(None)[:3]:
        for name in (name for panel in panels for name in panel["config"]["metrics"]):
            general = re.sub(r"^\w+/(?=k\d|ess)", "<pair>/", re.sub("/(short|medium|long)$", "/<band>", name))
            assert f"`{name}`" in explained or f"`{general}`" in explained, name


def test_it_shows_how_well_a_machine_is_used(asked):
    named = {
        name for _, _, panels in grids(None)[:3] for panel in panels for name in panel["config"]["metrics"]
    }
    assert {"perf/mfu", "weights/transfer_gb_per_s", "weights/paused_s", "idle/learner"} <= named
    patterns = [
        panel["config"]["metricRegex"]
        for _, _, panels in grids(None)[:3]
        for panel in panels
        if panel["config"].get("useMetricRegex")
    ]
    assert any(re.search(pattern, "memory/allocated_bytes/rank0") for pattern in patterns)


def test_charts_lie_in_rows_beside_each_other(asked):
    for heading, _, panels in grids(None):
        places = [panel["layout"] for panel in panels]
        cells = [
            (x, y)
            for one in places
            for x in range(one["x"], one["x"] + one["w"])
            for y in range(one["y"], one["y"] + one["h"])
        ]
        assert len(cells) == len({*cells}) and all(0 <= x < 24 for x, _ in cells), heading


def test_the_samples_of_named_sets_have_their_own_tables(asked):
    for sets, held_out in (
        ((), ["samples/eval"]),
        (("math", "code"), ["samples/eval/math", "samples/eval/code"]),
    ):
        text = json.dumps(overview("me", "asyncrl", None, sets)._to_model().spec.model_dump(by_alias=True))
        assert re.findall(r'"(samples/[^"]+)"', text) == ["samples/train", *held_out]


def test_it_shows_all_runs_or_one(asked):
    for run, filters in ((None, []), ("quickstart", [("displayName", "=", "quickstart")])):
        for _, (runs,), _ in grids(run):
            found = [(one["key"]["name"], one["op"], one["value"]) for one in runs["filters"]["filters"]]
            assert found == filters and runs["project"] == {"name": "asyncrl", "entityName": "me", "id": "77"}
    assert all(one == {"entityName": "me", "projectName": "asyncrl"} for one in asked)


def test_a_project_without_its_entity_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["overview.py", "asyncrl"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "found 'asyncrl'; give the entity" in capsys.readouterr().err
