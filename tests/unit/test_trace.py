"""The timeline: what Perfetto reads, spans that nest, and durations that are those of the metrics."""

import json
import logging
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner import Step
from asyncrl.report.step_metrics import step_metrics
from asyncrl.report.timeline import END, LIFE, OPENING, Timeline
from asyncrl.stopwatch import Span, Stopwatch
from asyncrl.telemetry.jsonl import Lines
from asyncrl.types import Group, GroupTimes
from asyncrl.weights.base import UpdateReport
from tests.support.steps import group, rollout, step
from tests.support.waiting import let_pass

T0 = 1_700_000_000.0


def events(path: Path) -> list[dict[str, Any]]:
    """As Perfetto reads an open array: it begins with `[{"`, skips commas, and may lack its end."""
    text = path.read_text()
    assert text.startswith('[\n{"')
    return [json.loads(line.removesuffix(",")) for line in text.splitlines()[1:]]


def slices(path: Path) -> list[dict[str, Any]]:
    """Complete events with the names of their tracks."""
    names = {
        (one["pid"], one["tid"], one["name"]): one["args"]["name"] for one in events(path) if one["ph"] == "M"
    }
    return [
        one | {kind: names[(one["pid"], one["tid"], f"{kind}_name")] for kind in ("process", "thread")}
        for one in events(path)
        if one["ph"] == "X"
    ]


def assert_nested(found: list[dict[str, Any]]) -> None:
    """On one track two slices are apart, or one holds the other."""
    tracks = {(one["process"], one["thread"]) for one in found}
    for track in tracks:
        spans = sorted((one["ts"], -one["dur"]) for one in found if (one["process"], one["thread"]) == track)
        open_ends: list[int] = []
        for start, negative in spans:
            end = start - negative
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], track
            open_ends.append(end)


def lived(one: Group, leased_at: float, *, wait_s: float = 0.5, put_s: float = 0.25) -> Group:
    """The group with a life that began at `leased_at`."""
    sampling_at = leased_at + wait_s
    times = GroupTimes(leased_at, sampling_at, sampling_at + one.sampling_s + one.reward_s + put_s)
    return replace(one, times=times)


def whole_step(
    groups: list[Group], rejected: list[tuple[Group, str]], taken_at: float, started_at: float
) -> Step:
    clock = Stopwatch()
    at = started_at
    for name, seconds in (
        ("wait_groups", 2.0),
        ("measure", 0.5),
        ("plan", 0.125),
        ("train", 4.0),
        ("publish", 0.25),
    ):
        clock.spans.append(Span(name, at, seconds))
        clock.seconds[name] = seconds
        at += seconds
    base = step(rollout(a=1.0))
    taken = {one.ticket_id: taken_at for one in (*groups, *(one for one, _ in rejected))}
    collected = replace(base.collected, groups=tuple(groups), rejected=tuple(rejected), taken_at=taken)
    return replace(base, version=7, collected=collected, seconds=clock.seconds, spans=clock.spans)


def some_group(ticket_id: int, sampling_s: float = 3.0, reward_s: float = 1.0) -> Group:
    return replace(
        group([0.0, 1.0], [2, 2], ticket_id), sampling_s=sampling_s, reward_s=reward_s, generator_id="g0"
    )


def test_a_group_lives_from_its_lease_to_its_training(tmp_path: Path) -> None:
    trace = Timeline(tmp_path / "trace.json")
    one, other = lived(some_group(1), T0), lived(some_group(2), T0 + 1.0)
    done = whole_step([one], [(other, "zero_variance")], T0 + 9.0, T0 + 7.5)
    trace.step(done)
    trace.close()
    found = slices(tmp_path / "trace.json")
    assert_nested(found)
    (life,) = [part for part in found if part["name"] == "group 1"]
    assert life["args"] == {"outcome": "trained in step 7", "oldest_version": 0, "newest_version": 0}
    parts = [part for part in found if part["thread"] == life["thread"] and part is not life]
    assert [part["name"] for part in parts] == list(LIFE) and {part["process"] for part in parts} == {"g0"}
    assert [part["dur"] / 1e6 for part in parts] == [0.5, 3.0, 1.0, 0.25, 9.0 - 4.75, 1.125, 4.0]
    assert sum(part["dur"] for part in parts) == life["dur"], "nothing of its life is untold"
    assert all(before["ts"] + before["dur"] == after["ts"] for before, after in pairwise(parts))
    (gone,) = [part for part in found if part["name"] == "group 2"]
    assert gone["args"]["outcome"] == "rejected: zero_variance" and gone["thread"] != life["thread"], (
        "both were alive at once"
    )
    assert [part["name"] for part in found if part["thread"] == gone["thread"]] == ["group 2", *LIFE[:5]]


def test_the_parts_of_a_step_are_its_metrics(tmp_path: Path) -> None:
    done = whole_step([lived(some_group(1), T0)], [], T0 + 9.0, T0 + 7.5)
    trace = Timeline(tmp_path / "trace.json")
    trace.step(done)
    trace.close()
    steps = [one for one in slices(tmp_path / "trace.json") if one["thread"] == "steps"]
    published = step_metrics(done)
    assert steps[0]["name"] == "step 7" and steps[0]["dur"] / 1e6 == published["time/step"]
    assert {one["name"]: one["dur"] / 1e6 for one in steps[1:]} == {
        name.removeprefix("time/"): value
        for name, value in published.items()
        if name.startswith("time/") and name not in ("time/step", "time/sampling_s", "time/reward_s")
    }


def test_a_stopwatch_tells_when_and_how_long_and_both_agree() -> None:
    clock, before_at = Stopwatch(), time.time()
    for name in ("hooks", "train", "hooks"):
        with clock.time(name):
            let_pass(0.002)
    assert [span.name for span in clock.spans] == ["hooks", "train", "hooks"]
    for name, seconds in clock.seconds.items():
        assert seconds == pytest.approx(sum(span.duration_s for span in clock.spans if span.name == name))
    assert (
        before_at
        <= clock.spans[0].started_at
        <= clock.spans[1].started_at
        <= clock.spans[2].started_at
        <= time.time()
    )


moment = st.floats(0.0, 100.0)


@given(lives=st.lists(st.tuples(moment, moment, moment, moment, moment, moment), max_size=12))
def test_whatever_the_clocks_say_spans_nest_and_are_not_negative(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[float, ...]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace = Timeline(path)
    for number, (leased, sampling, put, sampling_s, reward_s, taken) in enumerate(lives, start=1):
        times = GroupTimes(T0 + leased, T0 + sampling, T0 + put)
        trace.step(
            whole_step(
                [replace(some_group(number, sampling_s, reward_s), times=times)], [], T0 + taken, T0 + taken
            ),
        )
    trace.close()
    if lives:
        of_groups = [one for one in slices(path) if one["process"] == "g0"]
        assert all(one["dur"] >= 0 for one in of_groups)
        assert_nested(of_groups)


def test_a_full_file_makes_room_and_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Timeline(path, max_bytes=4096)
    for second in range(200):
        trace.slice("learner", "steps", f"step {second}", T0 + second, T0 + second + 1)
    trace.close()
    kept = [one["name"] for name in ("trace.1.json", "trace.json") for one in slices(tmp_path / name)]
    assert kept == [f"step {second}" for second in range(200 - len(kept), 200)] and 20 < len(kept) < 200
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["trace.1.json", "trace.json"]
    assert all(entry.stat().st_size < 4096 + 256 for entry in tmp_path.iterdir())
    before = len(events(path))
    with path.open("ab") as file:
        file.write(b'{"ph":"X","na')
    trace = Timeline(path)
    trace.slice("g0", "weights", "version 1", T0, T0 + 1)
    trace.close()
    assert len(events(path)) == before + 3 and slices(path)[-1]["process"] == "g0"
    path.write_bytes(b"[")
    Timeline(path).close()
    assert path.read_bytes() == b"[\n"


def test_an_update_ends_when_it_is_reported(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    timeline.update("g1", UpdateReport(version=3, applied=True, paused_s=0.25, update_s=2.0, probe_max=0.01))
    timeline.update("g1", UpdateReport(version=4, applied=False, reason="lost", update_s=0.0))
    timeline.checkpoint(3, 1.5)
    timeline.close()
    good, bad, saved = slices(tmp_path / "trace.json")
    assert (good["process"], good["thread"], good["name"], good["dur"]) == (
        "g1",
        "weights",
        "version 3",
        2_000_000,
    )
    assert abs((good["ts"] + good["dur"]) / 1e6 - time.time()) < 60 and good["args"]["paused_s"] == 0.25
    assert bad["args"]["outcome"] == "lost" and saved["name"] == "checkpoint 3" and saved["dur"] == 1_500_000


def test_a_timeline_that_cannot_be_written_is_told_and_nothing_of_it_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path)
    timeline.checkpoint(0, 1.0)
    path.rename(tmp_path / "before")
    path.mkdir()
    for version in (1, 2):
        timeline.checkpoint(version, 1.0)
    path.rmdir()
    (tmp_path / "before").rename(path)
    timeline.checkpoint(3, 1.0)
    timeline.close()
    timeline.checkpoint(4, 1.0)
    (said,) = [entry.message for entry in caplog.records if entry.levelno >= logging.ERROR]
    assert "the run goes on" in said and "Is a directory" in said
    assert [event["name"] for event in slices(path)] == [f"checkpoint {version}" for version in range(4)]
    nowhere = Timeline(None)
    nowhere.checkpoint(1, 1.0)
    nowhere.close()


def test_a_step_that_the_disk_cut_short_is_whole_once_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path)
    timeline.step(whole_step([lived(some_group(1), T0)], [], T0 + 9.0, T0 + 7.5))
    timeline.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    lines = Lines(path, opening=OPENING, end=END)
    missing = whole[len(path.read_bytes()) :]
    lines.put(*(one.decode() for one in missing.split(END)[:-1]))
    lines.close()
    assert path.read_bytes() == whole


def test_what_a_timeline_cannot_express_costs_that_entry_only(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    with pytest.raises(ValueError, match="NaN"):
        timeline.checkpoint(0, float("nan"))
    timeline.checkpoint(1, 1.0)
    timeline.close()
    assert [event["name"] for event in slices(tmp_path / "trace.json")] == ["checkpoint 1"]
