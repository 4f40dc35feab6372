"""Runs side by side: what they reached, and only the settings in which they differ."""

import json
import statistics
from pathlib import Path

import pytest
import yaml

from asyncrl.cli.after import compare
from asyncrl.errors import RunError
from asyncrl.results.archive import read_archive
from asyncrl.results.compare import differences, flat, labelled, over_time, overlaid, results
from asyncrl.results.page import Table
from asyncrl.run.directory import RunDirectory
from tests.support.run_page import Page


def make_run(
    directory: Path, rewards: list[float], config: dict, *, accuracy: dict[int, float] | None = None
) -> Path:
    (directory / "metrics").mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [
        {
            "step": step,
            "time": 1000.0 + 60 * step,
            "time/step": 2.0,
            "reward/mean": reward,
            "idle/learner": 0.5,
        }
        for step, reward in enumerate(rewards, start=1)
    ]
    rows += [
        {"step": step, "time": 1e6, "eval/accuracy": value, "eval/reward_mean": value}
        | ({"eval/se/accuracy": 0.0213, "eval/prompts": 1319} if step else {})
        for step, value in (accuracy or {}).items()
    ]
    (directory / "metrics" / "learner.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = {"time": 1060.0, "step": 0, "versions": {}, "hardware": "2 CPU cores"}
    (directory / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    same = {"learner": {"steps": 30}, "batch": {"groups": 8}}
    first = same | {
        "run": {"name": "a", "root": "x"},
        "algorithm": {"advantage": {"name": "grpo"}, "filters": []},
    }
    second = same | {
        "run": {"name": "b", "root": "y"},
        "algorithm": {"advantage": {"name": "rloo", "k": 1}, "filters": ["[red]"]},
    }
    rising = [step / 30 for step in range(30)]
    return [
        make_run(tmp_path / "a", rising, first, accuracy={0: 0.1, 10: 0.7, 20: 0.7, 30: 0.5}),
        make_run(tmp_path / "b", [0.2, 0.9, 0.4], second),
    ]


def column(table: Table, index: int) -> dict[str, str]:
    return {row[0]: row[index] for row in table.rows}


def test_results_are_the_first_best_and_last_of_each_run(runs: list[Path]) -> None:
    archives = labelled([read_archive(RunDirectory(run)) for run in runs])
    a, b = (column(results(archives), index) for index in (1, 2))
    assert (
        a["eval/accuracy, first"] == "0.1 (step 0)"
        and a["eval/accuracy, last"] == "0.5 ± 0.021 (n 1,319, step 30)"
    )
    assert a["eval/accuracy, best"] == "0.7 ± 0.021 (n 1,319, step 10)", "the first of equals"
    assert a["reward/mean, last tenth"] == f"{(27 + 28 + 29) / 3 / 30:.3g}"
    assert (
        b["eval/accuracy, best"] == "-"
        and b["reward/mean, best"] == "0.9 (step 2)"
        and b["reward/mean, last tenth"] == "0.4"
    )
    assert a["step"] == "30 of 30" and b["step"] == "3 of 30" and a["idle/learner, mean"] == "0.5"


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11, 14, 15, 25, 30, 35, 70])
def test_the_last_tenth_of_a_run_is_a_tenth_and_the_step_where_it_begins(tmp_path: Path, steps: int) -> None:
    make_run(tmp_path, [float(step) for step in range(1, steps + 1)], {})
    shown = column(results(labelled([read_archive(RunDirectory(tmp_path))])), 1)["reward/mean, last tenth"]
    last = [step for step in range(1, steps + 1) if 10 * (steps - step) < steps]
    assert shown == f"{statistics.fmean(last):.3g}"


def test_only_settings_that_differ_are_told_and_names_never_are(runs: list[Path]) -> None:
    (settings,) = differences(labelled([read_archive(RunDirectory(run)) for run in runs]))
    assert set(map(tuple, settings.rows)) == {
        ("algorithm.advantage.name", "grpo", "rloo"),
        ("algorithm.advantage.k", "-", "1"),
        ("algorithm.filters", "[]", "['[red]']"),
    }
    assert dict(flat({"a": {"b": {}, "c": {"d": None}}})) == {"a.b": "{}", "a.c.d": "None"}


def test_runs_of_one_name_are_told_apart_by_their_directory(runs: list[Path]) -> None:
    archives = [read_archive(RunDirectory(run)) for run in (runs[0], runs[0].parent / "a", runs[1])]
    assert list(labelled([archives[0], archives[2]])) == ["a", "b"]
    (runs[1] / "config.yaml").write_text("run: {name: a}")
    assert list(labelled([archives[0], read_archive(RunDirectory(runs[1]))])) == [str(runs[0]), str(runs[1])]


def test_the_page_overlays_curves_by_step_and_by_time(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(runs, tmp_path / "page.html")
    said = capsys.readouterr().out
    assert "['[red]']" in said and "algorithm.advantage.name" in said and "batch.groups" not in said
    page = Page((tmp_path / "page.html").read_text())
    assert [step for step, _ in page.curves("Reward (reward/mean)")["b"]] == [1, 2, 3]
    assert page.curves("Reward over time")["b"] == [(0.0, 0.2), (1.0, 0.9), (2.0, 0.4)]
    assert page.curves("Held-out reward (eval/reward_mean)").keys() == {"a"}
    assert over_time(read_archive(RunDirectory(runs[1])), "nothing") == []


def test_a_run_that_was_evaluated_and_made_no_step_begins_with_the_others(
    runs: list[Path], tmp_path: Path
) -> None:
    make_run(tmp_path / "c", [], {}, accuracy={0: 0.1})
    archives = labelled([read_archive(RunDirectory(run)) for run in (*runs, tmp_path / "c")])
    assert over_time(archives["c"], "eval/reward_mean") == [(0.0, 0.1)]


def test_the_page_shows_a_metric_once(runs: list[Path]) -> None:
    with (runs[0] / "metrics" / "learner.jsonl").open("a") as file:
        file.write('{"step": 31, "time": 1e6, "environment/tools/calls": 2.0, "environment/model_s": 1.0}\n')
    charts = overlaid(labelled([read_archive(RunDirectory(run)) for run in runs]))
    assert [chart["title"] for chart in charts if "environment/" in chart["title"]] == [
        "Tool calls of an episode (environment/tools/calls)",
        "Seconds of an episode (environment/model_s)",
    ]


def test_one_run_cannot_be_compared(runs: list[Path]) -> None:
    for given in (runs[:1], [runs[0], runs[1], runs[0].parent / "b" / ".." / "a"]):
        with pytest.raises(RunError, match="at least two runs, each once"):
            compare(given, None)
