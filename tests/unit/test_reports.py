"""What is shown of a run may fail in any of its parts; the step, and all other parts, go on."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.best_effort import BestEffort
from asyncrl.evaluation import EvalResult
from asyncrl.launch.status_page import Ticker
from asyncrl.report import reports as reports_module
from asyncrl.report.reports import Reporting
from asyncrl.report.timeline import Timeline
from asyncrl.telemetry.alarms import Alarms
from asyncrl.telemetry.fanout import Trackers
from tests.support.steps import rollout, step


class Book:
    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.shown = 0

    def log(self, metrics: Any, *, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def samples(self, records: Any) -> None:
        self.shown += len(records)

    def close(self) -> None: ...


def reports(book: Book, path: Path) -> Reporting:
    trackers = Trackers([lambda: book], Alarms())
    return Reporting(trackers, Timeline(path / "trace.json"), str, samples_per_step=4)


def fail(*args: Any, **more: Any) -> Any:
    raise OverflowError("cannot convert float infinity to integer")


PARTS = {
    "metrics": (reports_module, "step_metrics"),
    "timeline": (Timeline, "step"),
    "samples": (reports_module, "sample_records"),
    "samples of an evaluation": (reports_module, "eval_records"),
    "trackers and alarms": (Alarms, "watch"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails_is_counted_and_the_others_go_on(part, monkeypatch, tmp_path, caplog):
    book = Book()
    shown, whole, full = reports(book, tmp_path), Book(), tmp_path / "full"
    full.mkdir()
    unharmed = reports(whole, full)
    monkeypatch.setattr(*PARTS[part], fail)
    result = EvalResult(version=1, metrics={"eval/reward_mean": 0.5}, groups=())
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            shown.step(step(rollout(a=1.0)), [], {"weights/sent": 7.0})
            shown.evaluation([result])
    monkeypatch.undo()
    assert shown.guard.failures[part] >= 3 and set(shown.guard.failures) == {part}
    assert len([record for record in caplog.records if part in record.message]) == 1, "said once"
    for _ in range(3):
        unharmed.step(step(rollout(a=1.0)), [], {"weights/sent": 7.0})
        unharmed.evaluation([result])
    if part == "trackers and alarms":
        return
    assert [row["weights/sent"] for at, row in book.rows if "weights/sent" in row] == [7.0] * 3
    if part == "samples of an evaluation":
        assert book.rows[-1] == whole.rows[-1]
    elif part != "metrics":
        expected = [
            row | {"telemetry/failed": count}
            for count, (_, row) in zip((1, 2, 3), whole.rows[::2], strict=True)
        ]
        assert [row for _, row in book.rows[::2]] == expected
    assert book.shown == (0 if part == "samples" else whole.shown)


def test_a_tick_that_fails_is_not_the_last():
    guard, ticks = BestEffort(), SimpleNamespace(count=0)

    def tick() -> None:
        ticks.count += 1
        raise ZeroDivisionError

    ticker = Ticker(tick, guard)
    ticker.close()
    assert guard.failures.total() == ticks.count >= 1
