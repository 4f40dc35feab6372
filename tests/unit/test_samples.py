"""Which samples are shown, and that none of them can be anything but text on a terminal."""

import io
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asyncrl.cli.screens import full_lines, show_environment, show_samples
from asyncrl.errors import RunError
from asyncrl.results.recorded import Wanted, choose, samples_of, wanted
from asyncrl.run.directory import RunDirectory
from asyncrl.run.lock import RunLock
from asyncrl.telemetry.base import SampleRecord, sample_from
from asyncrl.telemetry.jsonl import Tail
from tests.support.synthetic_run import NASTY, SyntheticRun


def sample(**values: object) -> SampleRecord:
    base = SampleRecord(
        step=3, ticket_id=7, prompt="1+1=", response="2", reward=1.0, parts={"exact": 1.0, "format": 0.5}, advantage=0.3,
        versions=[(1, 4), (2, 9)], finish_reason="stop", generator_id="g0",
    )  # fmt: skip
    return replace(base, **values)  # type: ignore[arg-type]


def printed(record: SampleRecord) -> str:
    """As a terminal with colours would get it."""
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80, highlight=False
    )
    for line in full_lines(record):
        console.print(line, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_all_that_is_known_of_a_rollout_is_shown() -> None:
    head, prompt, response = [line.plain for line in full_lines(sample())]
    assert head.startswith("step 3, trained: reward 1") and prompt == "  ? 1+1=" and response == "  | 2"
    for part in (
        "exact 1, format 0.5",
        "advantage 0.3",
        "tokens by version: v1 4, v2 9",
        "stop",
        "g0",
        "ticket 7",
    ):
        assert part in head
    assert "answer 2 ·" in full_lines(sample(answer="2"))[0].plain and "answer" not in head
    (dead,) = full_lines(
        sample(kind="dropped", reason="dead: timed out", reward=math.nan, prompt="", response="", versions=())
    )
    assert dead.plain.startswith("step 3, dropped (dead: timed out)  exact 1") and "nan" not in dead.plain


@given(st.text(), st.text(), st.text())
def test_a_text_cannot_leave_its_lines(prompt: str, response: str, name: str) -> None:
    """Every line that is shown is ours: the head, or one behind a bar or a question mark."""
    lines = full_lines(
        sample(prompt=prompt, response=response, parts={name: 1.0}, reason=name, kind="dropped", answer=name)
    )
    assert not [
        line
        for line in lines
        if "\n" in line.plain or "\r" in line.plain or "\x1b" in line.plain or "\x9b" in line.plain
    ]
    assert all(line.plain.startswith(("  ? ", "  | ")) for line in lines[1:])
    assert not [span for line in lines[1:] for span in line.spans], "no markup"


def test_what_the_terminal_gets_has_no_codes_of_the_model() -> None:
    plain, nasty = (
        printed(sample(response="2")),
        printed(sample(response=NASTY, prompt=NASTY, parts={NASTY: 1.0})),
    )
    assert set(plain) & set("\x1b") and {code for code in nasty.split("\x1b[") if code[:2] == "31"} == set()
    assert "[red]" in nasty and "[/red]" in nasty
    for sign in ("\x07", "\x9b", "\u202e", "\u200b"):
        assert sign not in nasty


SAMPLES = [
    sample(step=step, ticket_id=10 * step + index, reward=reward, kind=kind)
    for step in (1, 2, 3)
    for index, (reward, kind) in enumerate(
        [(0.5, "train"), (0.1 * step, "train"), (9.0, "eval"), (-9.0, "dropped"), (math.nan, "train")]
    )
]


def test_best_and_worst_are_by_reward_and_of_equals_the_newest() -> None:
    def tickets(**values: object) -> list[int]:
        return [record.ticket_id for record in choose(iter(SAMPLES), Wanted(count=3, **values))[0]]  # type: ignore[arg-type]

    assert tickets() == [32, 33, 34]
    assert tickets(order="best") == tickets(kind="train", order="best") == [30, 20, 10]
    assert tickets(order="worst") == tickets(kind="train", order="worst") == [11, 21, 31]
    assert tickets(step=2) == [22, 23, 24] and tickets(kind="dropped") == [13, 23, 33]
    assert tickets(kind="eval", order="best") == [32, 22, 12] and tickets(step=7) == []


def test_options_mean_what_they_say_and_contradictions_are_refused() -> None:
    nothing = {"best": False, "worst": False, "dropped": False}
    assert wanted(5, None, None, **nothing | {"best": True}) == Wanted(count=5, order="best")
    assert wanted(5, 2, "eval", **nothing | {"worst": True}) == Wanted(
        count=5, step=2, kind="eval", order="worst"
    )
    assert wanted(5, None, None, **nothing | {"dropped": True}) == Wanted(count=5, kind="dropped")
    for kind, flags in ((None, {"best": True, "worst": True}), ("train", {"dropped": True}), ("trained", {})):
        with pytest.raises(RunError):
            wanted(5, None, kind, **nothing | flags)


def run_of(directory: Path, records: list[SampleRecord]) -> SyntheticRun:
    run = SyntheticRun(directory / "run")
    (run.directory / "config.yaml").write_text("run: {name: run}\n")
    run.learner.samples(records)
    return run


def test_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    run = run_of(tmp_path, SAMPLES)
    with (run.directory / "samples.jsonl").open("a") as file:
        file.write(json.dumps(asdict(SAMPLES[0]))[:30])
    read = [*map(sample_from, Tail(run.directory / "samples.jsonl"))]
    assert [record.ticket_id for record in read] == [record.ticket_id for record in SAMPLES]


def test_nothing_to_show_is_said(tmp_path: Path) -> None:
    run = run_of(tmp_path, SAMPLES)
    with pytest.raises(RunError, match="no such sample"):
        show_samples(samples_of(run.directory, Wanted(count=1, step=99), follow=False))
    with pytest.raises(RunError, match="choose one"):
        show_samples(samples_of(run.directory, Wanted(count=1, order="best"), follow=True))


def test_following_shows_what_is_there_then_what_comes_and_ends_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, SAMPLES[:5])
    run.finish("training")
    lock = RunLock(RunDirectory(run.directory).supervisor_lock)

    def write(seconds: float) -> None:
        run.learner.samples(SAMPLES[5:])
        lock.release()  # and the status stays, as if the supervisor were killed

    monkeypatch.setattr(time, "sleep", write)
    show_samples(samples_of(run.directory, Wanted(count=1, kind="eval"), follow=True))
    said = capsys.readouterr().out
    assert [f"ticket {ticket}" in said for ticket in (12, 22, 32, 11, 33)] == [True, True, True, False, False]


def test_no_text_of_an_environment_moves_the_cursor_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said, schemas = "\x1b[2J", [{"description": "\x1b[2J\x9b2J"}]
    trial = {"description": {}, "schemas": schemas, "spoken": [("user", said)], "outcome": None}
    show_environment(SimpleNamespace(**trial, problem=said))
    expected = '{"description": "\\u001b[2J\\u009b2J"}\n       user | ␛[2J\nfailed: ␛[2J\n'
    assert capsys.readouterr().out == expected
