"""Any metric by name: right statistics, all values in a file, and a hint where a name is wrong."""

import csv
import json
import statistics as oracle
from pathlib import Path

import pytest

from asyncrl.cli.after import analyze
from asyncrl.errors import RunError
from asyncrl.results.analyze import MOST_COLUMNS, MOST_ROWS, Metric, choose, metrics_of, statistics, values
from asyncrl.telemetry.text import number
from tests.support.run_page import Page, archive_of, run_in
from tests.support.synthetic_run import SyntheticRun


@pytest.fixture
def run(tmp_path: Path) -> SyntheticRun:
    return run_in(tmp_path, steps=50)


def test_statistics_are_those_of_the_standard_library(run: SyntheticRun) -> None:
    chosen = choose(metrics_of(archive_of(run)), ["reward/mean"])
    rewards = [
        json.loads(line) for line in (run.directory / "metrics" / "learner.jsonl").read_text().splitlines()
    ]
    expected = {row["step"]: row["reward/mean"] for row in rewards if "reward/mean" in row}
    ((name, count, first, last, lowest, highest, mean, std),) = statistics(chosen).rows
    numbers = list(expected.values())
    assert (name, count, first, last) == ("reward/mean", "50", number(numbers[0]), number(numbers[-1]))
    assert lowest == f"{number(min(numbers))} at {min(expected, key=expected.__getitem__)}"
    assert highest == f"{number(max(numbers))} at {max(expected, key=expected.__getitem__)}"
    assert (mean, std) == (number(oracle.fmean(numbers)), number(oracle.pstdev(numbers)))


def test_globs_choose_in_order_and_each_once(run: SyntheticRun) -> None:
    known = metrics_of(archive_of(run))
    assert list(choose(known, ["reward/*", "*/tokens_per_s", "reward/mean"])) == [
        "reward/mean", "reward/std", "g0/tokens_per_s", "g1/tokens_per_s",
    ]  # fmt: skip
    assert known["g0/idle_s"].axis == "s" and known["reward/mean"].axis == "step"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("reward_mean", "reward/mean"), ("entropy", "policy/entropy"), ("stalness/max", "staleness/max")],
)
def test_an_unknown_name_gets_the_nearest(run: SyntheticRun, wrong: str, right: str) -> None:
    with pytest.raises(RunError, match=right):
        choose(metrics_of(archive_of(run)), ["reward/mean", wrong])


def test_tables_are_short_and_keep_first_and_last() -> None:
    chosen = {
        f"m{index}": Metric("step", tuple((step, float(step)) for step in range(1000)))
        for index in range(MOST_COLUMNS + 1)
    }
    chosen["rare"] = Metric("step", ((500, 7.0),))
    chosen["late"] = Metric("s", ((5, 1.0), (9, 2.0)))
    first, second, rare, seconds = values(chosen)
    assert len(first.rows) == MOST_ROWS and (first.rows[0][0], first.rows[-1][0]) == ("0", "999")
    assert len(first.head) == MOST_COLUMNS + 1 and len(second.head) == 2
    assert list(rare.rows) == [("500", "7")], "what was measured at other steps has a table of its own"
    assert list(seconds.rows) == [("5", "1"), ("9", "2")] and seconds.head[0] == "s"


def test_files_hold_all_values(run: SyntheticRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    analyze(run.directory, ["reward/mean", "g0/idle_s"], tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    archive = archive_of(run)
    rewards = [(int(row["at"]), float(row["value"])) for row in rows if row["metric"] == "reward/mean"]
    assert (
        tuple(rewards) == archive.series("reward/mean")
        and len(rows) == 100
        and {row["axis"] for row in rows} == {"step", "s"}
    )
    analyze(run.directory, ["reward/mean"], tmp_path / "out.html")
    page = Page((tmp_path / "out.html").read_text())
    assert tuple(page.curves("reward/mean")["reward/mean"]) == archive.series("reward/mean")
    assert "reward/mean by step" in capsys.readouterr().out
    with pytest.raises(RunError, match=r"allowed are \.html and \.csv"):
        analyze(run.directory, ["reward/mean"], tmp_path / "out.png")


def test_without_names_all_are_listed(run: SyntheticRun, capsys: pytest.CaptureFixture[str]) -> None:
    analyze(run.directory, [], None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(metrics_of(archive_of(run))) and lines[0].startswith(
        "completions/length_max  50 values, last 512"
    )
    assert any(line.startswith("g1/alive_s  50 values") for line in lines)
