"""What is shown of a run may fail in any of its parts; the step, and all other parts, go on."""

import json
import logging
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from asyncrl.best_effort import BestEffort
from asyncrl.buffer.base import Audit
from asyncrl.control.base import MemberStatus
from asyncrl.errors import RunError
from asyncrl.evaluation import EvalResult, standard_error, summarise
from asyncrl.launch import status_page
from asyncrl.launch.status_page import Heard, StatusPage
from asyncrl.report import reports as reports_module
from asyncrl.report.reports import Reporting
from asyncrl.report.timeline import Timeline
from asyncrl.results.recorded import Wanted, samples_of
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.alarms import Alarms
from asyncrl.telemetry.fanout import Trackers
from asyncrl.telemetry.jsonl import Lines, Tail
from asyncrl.telemetry.status import StatusSnapshot, read_status, write_status
from asyncrl.types import Group
from tests.support.steps import rollout, step
from tests.support.telemetry_records import snapshot
from tests.support.waiting import LONG_S, elapse, in_virtual_time, wait_until


class Book:
    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.shown = 0

    def log(self, metrics: Any, *, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def samples(self, records: Any) -> None:
        self.shown += len(records)
        self.records = [*records]

    def close(self) -> None: ...


def reports(book: Book, path: Path) -> Reporting:
    trackers = Trackers([lambda: book])
    return Reporting(trackers, Timeline(path / "trace.json"), str, RunDirectory(path), samples_per_step=4)


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


def test_calls_of_a_tracker_that_fail_are_counted(tmp_path):
    book, broken = Book(), Mock(log=fail)
    shown = reports(book, tmp_path)
    shown.trackers = Trackers([lambda: book, lambda: broken])

    async def steps() -> None:
        for _ in range(3):
            shown.step(step(rollout(a=1.0)), [], {})
            await elapse(600.0)  # the pause after a failure

    in_virtual_time(steps())
    assert [row["telemetry/failed"] for _, row in book.rows] == [0.0, 1.0, 2.0]


def test_all_samples_of_an_evaluation_are_in_a_file_and_a_few_in_trackers(tmp_path):
    """Scores made again from the file are those of the metrics; an episode of several sequences is one."""
    book, number = Book(), count(0)
    (tmp_path / "config.yaml").write_text("run: {name: run}\n")
    groups = [
        Group(
            ticket_id=12 + place,
            rollouts=tuple(rollout(a=float(place in solved)) for place in range(3) for _ in range(2)),
            generator_id="g",
            finished_version=4,
            episode_of=np.repeat(np.arange(3, dtype=np.int32), 2),
        )
        for place, solved in enumerate([{0}, {1, 2}, {}, {0, 1, 2}, {2}, {0, 2}])
    ]
    groups[2] = Group.dead(14, "timed out", generator_id="g", version=4)
    shown = reports(book, tmp_path)
    shown.decode = lambda ids: f"text {next(number)}"
    first, again = summarise(groups[::-1], 4), summarise(groups, 4)
    shown.evaluation([first, again])
    assert [path.name for path in (tmp_path / "evaluations").iterdir()] == ["step-000004.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "evaluations" / "step-000004.jsonl").open()]
    assert len(lines) == 5 * 6 + 1 and len({line["response"] for line in lines}) == 31, "of the last round"
    scores = {}
    for line in lines:
        if line["kind"] == "eval":
            scores.setdefault(line["prompt_number"], {})[line["sample_number"]] = line["reward"]
    means = [np.mean([*of.values()]) for of in scores.values()]
    assert [*scores] == [1, 2, 4, 5, 6] and {len(of) for of in scores.values()} == {3}
    assert np.mean(means) == pytest.approx(again.metrics["eval/reward_mean"])
    assert standard_error(means) == pytest.approx(again.metrics["eval/se/reward_mean"])
    assert [(line["prompt_number"], line["reason"]) for line in lines if line["kind"] == "dropped"] == [
        (3, "held-out, timed out")
    ]
    assert [(one.kind, one.prompt_number, one.sample_number) for one in book.records] == [
        ("dropped", 3, 0), ("eval", 1, 1), ("eval", 2, 1), ("eval", 4, 1), ("eval", 5, 1),
    ]  # fmt: skip
    assert len(list(samples_of(tmp_path, Wanted(count=99, kind="eval"), follow=False))) == 30
    with pytest.raises(RunError, match="the steps that it has: 4"):
        samples_of(tmp_path, Wanted(count=1, kind="eval", step=5), follow=False)


HUB = SimpleNamespace(
    endpoint="tcp://host:1",
    members=lambda: [
        MemberStatus(generator_id="g0", state="sampling", version=1, silent_s=0.1, metrics={"alive_s": 5.0})
    ],
    counters=dict,
)


def test_a_tick_that_fails_is_not_the_last():
    guard, ticks = BestEffort(), SimpleNamespace(count=0)

    def renew(endpoint: str) -> None:
        ticks.count += 1
        raise ZeroDivisionError

    page = StatusPage(now=snapshot(message="done"), hub=HUB, taking=None, renew=renew, shows=(), guard=guard)
    assert page.close() == "done"
    assert guard.failures.total() == ticks.count >= 1


def test_the_status_goes_on_without_the_store_and_says_that_it_does_not_answer(monkeypatch, tmp_path):
    clock, answers, path = [0.0], threading.Event(), tmp_path / "status.json"
    monkeypatch.setattr(
        status_page, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0])
    )
    places = dict.fromkeys(("issued", "leased", "reissue", "ready", "taken", "done", "payload_bytes"), 0)
    audit = Audit(**places, counters={})
    page = StatusPage(
        now=snapshot(state="training", message="", audit=None),
        hub=HUB,
        taking=SimpleNamespace(audit=lambda: audit, mismatch=0),
        renew=lambda endpoint: answers.wait(LONG_S),
        shows=(partial(write_status, path),),
        guard=BestEffort(),
    )

    def shown(is_it: Callable[[StatusSnapshot], object]) -> StatusSnapshot:
        wait_until(lambda: (found := read_status(path)) and is_it(found))
        return read_status(path)

    assert shown(lambda found: found.members).message == ""
    clock[0] = 100.0
    silent = shown(lambda found: found.message)
    assert silent.message.startswith("the store has not answered for 1m40s") and silent.audit is None
    assert [member.generator_id for member in silent.members] == ["g0"]
    answers.set()
    shown(lambda found: found.audit == audit and not found.message)
    clock[0] = 200.0
    page.enter("stopped", "by the user")
    assert page.close() == "by the user" and read_status(path).message == "by the user"


def test_metrics_of_a_generator_that_shares_no_directory_are_kept_as_they_are_heard(tmp_path):
    """`near` writes its file itself, also `slow`, whose lines come late, and an earlier learner heard `again`."""
    again = MemberStatus(
        generator_id="again", state="sampling", version=1, silent_s=0.1, metrics={"alive_s": 5.0}
    )
    Heard(tmp_path).show(snapshot(members=(again,)))
    heard, lines = Heard(tmp_path), {name: Lines(tmp_path / f"{name}.jsonl") for name in ("near", "slow")}
    (tmp_path / "learner.jsonl").write_text("")
    names = ("near", "slow", "again", "far", "learner", "new")
    for alive_s in (10.0, 20.0, 20.0, 30.0):
        lines["near"].write([{"step": None, "alive_s": alive_s}])
        told = [
            MemberStatus(generator_id=name, state="sampling", version=1, silent_s=0.1, metrics=metrics)
            for name in names
            for metrics in ({"alive_s": alive_s} if name != "new" else {},)
        ]
        for _ in range(3):
            heard.show(snapshot(members=tuple(told)))
        for one in heard._generators.values():
            one.next_s = 0.0
    found = {file.stem: [row["alive_s"] for row in Tail(file)] for file in tmp_path.glob("*.jsonl")}
    assert found == {
        "near": [10.0, 20.0, 20.0, 30.0],
        "slow": [],
        "again": [5.0, 10.0, 20.0, 30.0],
        "far": [10.0, 20.0, 30.0],
        "learner": [],
    }
