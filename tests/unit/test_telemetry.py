"""Trackers write what happened, and nothing that happens to them reaches training."""

import errno
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyncrl.config.sections import ControlConfig, TelemetryConfig
from asyncrl.control.base import MemberStatus
from asyncrl.telemetry import fanout, jsonl
from asyncrl.telemetry.alarms import ALARMS, QUIET_STEPS, TOLD_STEPS, WINDOW, Alarms, Past, causes, ringing
from asyncrl.telemetry.exporter import prometheus_name
from asyncrl.telemetry.fanout import Trackers, open_trackers
from asyncrl.telemetry.history import History
from asyncrl.telemetry.jsonl import Tail
from asyncrl.telemetry.logs import LogContext, setup_logging
from asyncrl.telemetry.status import read_status, status_json, write_status
from asyncrl.telemetry.trackers import COLUMNS, JsonlTracker, split, table_rows
from tests.support.telemetry_records import LAGS, record, snapshot

RESOLVED = {"weights": {"probe_limit": 0.05}}


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_is_there_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "deep" / "m.jsonl", tmp_path / "s.jsonl")
    tracker.log({"reward/mean": np.float32(0.5), "groups/trained": 32}, step=3)
    tracker.log({"tokens_per_s": 7.0})
    tracker.samples([record(), record(reward=math.nan)])
    first, second = lines(tmp_path / "deep" / "m.jsonl")
    assert (first["step"], first["reward/mean"], first["groups/trained"]) == (3, 0.5, 32)
    assert second["step"] is None and second["time"] >= first["time"] > 1.6e9
    samples = lines(tmp_path / "s.jsonl")
    assert samples[0]["versions"] == [[0, 3], [1, 2]] and samples[0]["response"] == "4\n\ud83d"
    assert samples[1]["reward"] is None
    tracker.close()


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log({"policy/loss": math.nan, "a": 1.0}, step=1)
    tracker.log({"policy/loss": -math.inf, "a": math.inf}, step=2)
    tracker.close()
    first, second = (
        {name: line[name] for name in ("policy/loss", "a")} for line in lines(tmp_path / "m.jsonl")
    )
    assert first == {"policy/loss": None, "a": 1.0} and second == {"policy/loss": None, "a": None}


def test_a_torn_line_spoils_neither_the_one_before_nor_the_one_after(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for step in (1, 2):
        tracker = JsonlTracker(path)
        tracker.log({"x": float(step)}, step=step)
        tracker.close()
        with path.open("ab") as file:
            file.write(b'{"step": 9, "x"')
    tail = Tail(path)
    assert [row["step"] for row in tail] == [1, 2]
    with path.open("ab") as file:
        file.write(b": 9.0}\n")
    assert [row["step"] for row in tail] == [9]


@given(
    cuts=st.lists(st.integers(1, 40), max_size=30),
    rows=st.lists(st.dictionaries(st.text(max_size=4), st.integers(), max_size=3), max_size=12),
)
def test_a_tail_reads_every_line_once_however_it_arrives(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], rows: list[dict[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "m.jsonl"
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    tail, seen = Tail(path), []
    for cut in [*cuts, len(data) + 1]:
        with path.open("ab") as file:
            file.write(data[:cut])
        data = data[cut:]
        seen += tail
    assert seen == rows


def test_a_tail_from_near_the_end_starts_at_a_whole_line_and_a_new_file_at_its_beginning(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"i": {i}}}\n' for i in range(100)))
    tail = Tail(path, last_bytes=25)
    assert [row["i"] for row in tail] == [98, 99]
    path.write_text('{"i": 0}\n')
    assert [row["i"] for row in tail] == [0]


@pytest.mark.parametrize("last_bytes", [0, 1, 9, 10, 11, 19, 20, 25, 999, 1000, 1001])
def test_a_tail_has_each_line_that_lies_within_its_last_bytes_whole(tmp_path: Path, last_bytes: int) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"i": {i:>2}}}\n' for i in range(100)))
    assert path.stat().st_size == 1000
    tail = Tail(path, last_bytes=last_bytes)
    assert [row["i"] for row in tail] == [*range(100)][100 - min(last_bytes // 10, 100) :]


@pytest.mark.parametrize("lines_of_new", [1, 5, 50])
def test_a_file_in_the_place_of_a_rotated_one_is_read_from_its_beginning(
    tmp_path: Path, lines_of_new: int
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"i": 0}\n' * 5 + '{"i": ')
    tail = Tail(path, last_bytes=20)
    assert list(tail) == [{"i": 0}]
    path.rename(tmp_path / "m.jsonl.1")
    path.write_text("".join(f'{{"i": {i}}}\n' for i in range(lines_of_new)))
    assert [row["i"] for row in tail] == [*range(lines_of_new)]


def test_a_resumed_run_replaces_the_steps_it_makes_again(tmp_path: Path) -> None:
    history = History()
    for step in range(1, 8):
        counts = {"groups/rejected_dead": 2, "episodes/missing/hung": step}
        history.add({"step": step, "time": 10.0 + step, "reward/mean": float(step)} | counts)
    history.add({"step": 5, "time": 30.0, "eval/accuracy": 0.5})  # late: it replaces nothing
    assert history.rows[5]["time"] == 15.0 and len(history.series("reward/mean")) == 7
    history.add({"step": 5, "time": 31.0, "reward/mean": 50.0})
    assert history.series("reward/mean") == ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0))
    assert history.series("eval/accuracy") == () and list(history.names) == [
        "time",
        "reward/mean",
        "groups/rejected_dead",
        "episodes/missing/hung",
    ]
    assert history.rejected == {"dead": 8} and history.missing == {"hung": 1 + 2 + 3 + 4}
    history.add({"step": 6, "reward/mean": 60.0, "x": None})
    history.add({"step": None, "reward/mean": 1.0})
    history.add({"step": 5, "eval/accuracy": 0.6})
    history.add({"step": 5, "eval/accuracy": 0.7})
    # A stop saves the last step again, if it was just saved.
    for _ in range(2):
        history.add({"step": 6, "time": 40.0, "time/checkpoint": 1.0})
        history.add({"step": 6, "time": 41.0, "checkpoint/failed": 1.0})
    assert history.series("reward/mean")[-1] == (6, 60.0) and "x" not in history.rows[6]
    assert history.series("eval/accuracy") == ((5, 0.7),)
    assert list(Tail(tmp_path / "none.jsonl")) == []


def test_an_evaluation_and_the_summary_of_a_stage_keep_the_training_of_their_step() -> None:
    """TRL writes the epoch into each of its records."""
    history, trained = History(), {"train/loss": 0.5, "time/step": 1.0, "train/epoch": 0.5}
    history.add({"step": 5, "time": 1.0, **trained})
    history.add({"step": 5, "time": 2.0, "eval/loss": 0.4, "train/epoch": 0.5})
    history.add({"step": 5, "time": 3.0, "train/total_flos": 7.0, "train/epoch": 0.5})
    assert history.rows == {5: {"time": 1.0, **trained, "eval/loss": 0.4, "train/total_flos": 7.0}}
    again = {"time": 4.0, "train/loss": 0.7, "train/epoch": 0.5}
    history.add({"step": 5, **again})
    assert history.rows == {5: again}, "a resume trains it again"


class Recorder:
    """A tracker that fails in one method."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.failing:
            raise OSError("disk full")

    def log(self, metrics: Any, *, step: int | None = None) -> None:
        self._call("log")

    def samples(self, records: Any) -> None:
        self._call("samples")

    def close(self) -> None:
        self._call("close")


@pytest.mark.parametrize("failing", ["log", "samples", "close"])
def test_a_failing_tracker_is_told_once_and_asked_again_after_a_pause(
    failing: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(fanout.time, "monotonic", lambda: clock[0])
    bad, good = Recorder(failing), Recorder()
    trackers = Trackers([lambda: bad, lambda: good])
    for step in range(3):
        trackers.log({"a": 1.0}, step=step)
        trackers.samples([record()])
    if failing != "close":
        assert bad.calls.count(failing) == 1 and bad.calls[-1] == failing, "it is let alone"
        for _ in range(20):
            clock[0] += fanout.BACKOFF.longest_s
            trackers.log({"a": 1.0}, step=4)
            trackers.samples([record()])
        assert bad.calls.count(failing) == 21
        bad.failing = ""
        clock[0] += fanout.BACKOFF.longest_s
        trackers.log({"a": 1.0}, step=5)
        trackers.samples([record()])
        assert bad.calls[-2:] == ["log", "samples"], "and it is back"
    trackers.close()
    assert good.calls[-1] == "close" and good.calls[:-1] == ["log", "samples"] * (len(good.calls) // 2)
    (message,) = [entry for entry in caplog.records if entry.levelno >= logging.ERROR]
    assert (
        message.message == f"{failing} of Recorder failed and will be tried again; the run goes on: disk full"
    )


def test_the_pause_follows_the_failed_attempt_and_grows_though_another_call_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, bad = [100.0], Recorder("log")
    monkeypatch.setattr(fanout.time, "monotonic", lambda: clock[0])

    class Slow(Recorder):
        def log(self, metrics: Any, *, step: int | None = None) -> None:
            clock[0] += 60.0
            super().log(metrics, step=step)

    slow, late = Slow("log"), []

    def opener() -> Recorder:
        late.append(clock[0])
        raise ImportError("no such library")

    slow_trackers, trackers = Trackers([lambda: slow]), Trackers([lambda: bad, opener])
    slow_trackers.log({"a": 1.0})
    slow_trackers.log({"a": 1.0})
    assert slow.calls == ["log"], "the next call comes within a second after the failure"
    bad.calls.clear()
    late.clear()
    for _ in range(16):
        trackers.samples([record()])
        trackers.log({"a": 1.0})
        clock[0] += fanout.BACKOFF.first_s
    # Pauses of 1, 2, 4 and 8 seconds lie before the fifth attempt.
    assert bad.calls.count("log") == len(late) + 1 == 5


@pytest.mark.parametrize(
    "odd",
    [b"7", "7", None, [1.0], 10**400, np.ones(2), torch.ones(2), 1j, object(), math.nan, math.inf],
    ids=lambda odd: type(odd).__name__,
)
def test_a_value_that_is_no_number_costs_no_other_value(
    odd: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = {"reward/mean": np.float32(0.5), "half \ud83d": torch.tensor(0.25), b"bytes": 1, "step": 9.0}
    metrics = tmp_path / "metrics" / "learner.jsonl"
    config = TelemetryConfig(tensorboard=True)
    seen = Recorder()
    trackers = open_trackers(config, "a", tmp_path, RESOLVED, key_id="5a17", also=seen)
    for step in (1, 2):
        trackers.log({"policy/entropy": odd, **others}, step=step)
    trackers.close()
    assert seen.calls == ["log", "log", "close"]
    for step, line in enumerate(lines(metrics), start=1):
        assert (line["step"], line["reward/mean"], line["half \\ud83d"], line["b'bytes'"]) == (
            step,
            0.5,
            0.25,
            1,
        )
        assert line["policy/entropy"] is None
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("reward/mean")] == [0.5, 0.5]
    assert len(events.Scalars("half \\ud83d")) == len(events.Scalars("policy/entropy")) == 2
    told = [entry.message for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert len(told) == (not isinstance(odd, float))
    assert all("metric policy/entropy is" in message and "not a number" in message for message in told)


def test_a_tracker_that_cannot_be_opened_is_opened_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, late, good = [100.0], Recorder(), Recorder()
    monkeypatch.setattr(fanout.time, "monotonic", lambda: clock[0])

    def opener() -> Recorder:
        if clock[0] < 150.0:
            raise ImportError("no such library")
        return late

    trackers = Trackers([opener, lambda: good])
    trackers.log({"a": 1.0})
    assert good.calls == ["log"] and len(caplog.records) == 1
    clock[0] = 160.0
    trackers.log({"a": 1.0})
    assert late.calls == ["log"]


def test_an_open_tracker_that_was_added_is_closed_also_if_nothing_was_logged() -> None:
    added = Recorder()
    trackers = Trackers([], added)
    trackers.close()
    assert added.calls == ["close"]


class FullDisk:
    """A raw file that takes `room` bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(data[: self.room])
        self.room -= taken
        return int(taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_lines_wait_for_room_on_the_disk_and_none_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, room = tmp_path / "m.jsonl", jsonl._open, [1 << 20]
    monkeypatch.setattr(jsonl, "_open", lambda *how: FullDisk(real(*how), room[0]))
    tracker = JsonlTracker(path)
    tracker.log({"a": 1.0}, step=1)
    tracker._metrics._file.room, room[0] = 10, 0  # type: ignore[union-attr]
    for step in range(2, 6):
        tracker.log({"a": 1.0}, step=step)
    room[0] = 80  # a line and a part of the next
    tracker.log({"a": 1.0}, step=6)
    room[0] = 1 << 20
    tracker.log({"a": 1.0}, step=7)
    tracker.close()
    tail = Tail(path)
    assert [line["step"] for line in tail] == [1, 2, 3, 4, 5, 6, 7]
    told = [
        entry for entry in caplog.records if "m.jsonl" in entry.message and entry.levelno >= logging.WARNING
    ]
    assert [entry.levelname for entry in told] == ["ERROR"]


def test_no_more_lines_wait_than_memory_is_meant_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    lines = jsonl.Lines(tmp_path / "file" / "m.jsonl")
    for step in range(jsonl.WAITING + 5):
        lines.write([{"step": step}])
    (tmp_path / "file").unlink()
    lines.write([{"step": -1}])
    written = list(Tail(tmp_path / "file" / "m.jsonl"))
    assert len(written) == jsonl.WAITING and written[0] == {"step": 6} and "lacks 6 lines" in caplog.text


def test_a_file_that_was_deleted_is_written_anew(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log({"a": 1.0}, step=1)
    (tmp_path / "m.jsonl").unlink()
    tracker.log({"a": 1.0}, step=2)
    assert [line["step"] for line in Tail(tmp_path / "m.jsonl")] == [2]


def test_without_wandb_it_is_not_imported(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from asyncrl.config.sections import TelemetryConfig
from asyncrl.telemetry.exporter import prometheus_name
from asyncrl.telemetry.fanout import open_trackers
directory = Path({str(tmp_path)!r})
trackers = open_trackers(TelemetryConfig(), "a", directory, {{"weights": {{"probe_limit": 0.05}}}}, key_id="5a17")
trackers.log({{"a": 1.0}}, step=1)
trackers.close()
import asyncrl.telemetry.live, asyncrl.telemetry.status
sys.exit(any(name in sys.modules for name in ("wandb", "tensorboard", "torch", "plotext")))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    assert lines(tmp_path / "metrics" / "learner.jsonl")[0]["a"] == 1.0


def test_online_wandb_without_a_key_is_left_out_and_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(type(wandb.api), "api_key", None)
    metrics = tmp_path / "metrics" / "learner.jsonl"
    trackers = open_trackers(TelemetryConfig(wandb="online"), "a", tmp_path, RESOLVED, key_id="5a17")
    trackers.log({"a": 1.0}, step=1)
    trackers.close()
    assert lines(metrics)[0]["a"] == 1.0
    (message,) = caplog.records
    assert message.exc_info and "wandb login" in str(message.exc_info[1])


def test_a_run_ends_though_wandb_takes_no_uploads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    run = Mock(dir=str(tmp_path / "wandb" / "run-1" / "files"))
    run.finish.side_effect = TimeoutError("Timed out finishing run.")
    monkeypatch.setattr(wandb, "init", opened := Mock(return_value=run))
    trackers = open_trackers(TelemetryConfig(wandb="offline"), "a", tmp_path, RESOLVED, key_id="5a17")
    settings = opened.call_args.kwargs["settings"]
    assert 0 < settings.finish_timeout < ControlConfig().slow_s and settings.finish_timeout_raises
    trackers.close()
    assert f"`wandb sync {tmp_path}/wandb/run-1` uploads it" in caplog.text


def test_a_status_comes_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read_status(path) is None
    for status in (snapshot(), snapshot(audit=None, members=(), message="out of \ud83d memory", lag_bound=6)):
        write_status(path, status)
        assert read_status(path) == status
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_a_status_is_json_for_others(tmp_path: Path) -> None:
    member = MemberStatus(
        generator_id="g0", state="sampling", version=3, silent_s=0.5, metrics={"x": math.nan}
    )
    status = snapshot(members=(member,), counters={"probe_max": math.inf})
    plain = json.loads(json.dumps(status_json(status), allow_nan=False))
    assert plain["audit"]["missing"] == 0 and plain["counters"] == {"probe_max": None}
    write_status(tmp_path / "status.json", status)
    read = read_status(tmp_path / "status.json")
    assert read and math.isnan(read.members[0].metrics["x"]) and math.isnan(read.counters["probe_max"])


@pytest.mark.parametrize("content", ["", "{", "[]", "\0\0\0", '{"step": 1}', '{"members": [{"metrics": 3}]}'])
def test_a_status_that_is_not_ours_is_none_and_said_once(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "status.json").write_text(content)
    assert read_status(tmp_path / "status.json") is None
    assert read_status(tmp_path / "status.json") is None
    assert caplog.text.count("status.json cannot be read and counts as missing") == 1


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_telemetry import snapshot, write_status
for step in range(150):
    write_status(Path({str(tmp_path)!r}) / "status.json", snapshot(step=step, message="x" * (step * 97 % 9000)))
"""
    writer = subprocess.Popen([sys.executable, "-c", code])
    try:
        steps = []
        while writer.poll() is None:
            if (status := read_status(tmp_path / "status.json")) is not None:
                steps.append(status.step)
        assert writer.wait(60) == 0
    finally:
        writer.kill()
        writer.wait()
    assert steps == sorted(steps)
    last = read_status(tmp_path / "status.json")
    assert last and last.step == 149


@contextmanager
def logging_restored() -> Iterator[logging.Logger]:
    """The root logger, as it was when the block is left."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        yield root
    finally:
        for handler in [handler for handler in root.handlers if handler not in before]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
        logging.captureWarnings(False)


def test_a_log_line_has_role_and_version_and_goes_to_the_process_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)  # of a trainer in this process
    with logging_restored() as root:
        setup_logging("other", tmp_path / "logs", console=False)
        context = setup_logging("generator-3", tmp_path / "logs", console=True)
        context.version = 12
        logging.getLogger("asyncrl.x").warning("late %d", 5, extra={"ticket_id": 7})
        logging.getLogger("asyncrl.x").info("a lone \ud83d half")
        ours = [
            handler
            for handler in root.handlers
            if any(isinstance(item, LogContext) for item in handler.filters)
        ]
        assert len(ours) == 2
    begins, late, half = lines(tmp_path / "logs" / "generator-3.jsonl")
    assert begins["version"] is None and begins["event"] == f"log of process {os.getpid()} begins"
    moment = datetime.fromisoformat(late.pop("time"))
    assert abs(moment.timestamp() - time.time()) < 60.0
    assert late == {
        "level": "warning", "process": "generator-3", "version": 12, "logger": "asyncrl.x", "event": "late 5", "ticket_id": 7,
    }  # fmt: skip
    assert half["event"] == "a lone \ud83d half"
    assert [line["process"] for line in lines(tmp_path / "logs" / "other.jsonl")] == ["other"]
    assert " WARNING generator-3 v12 asyncrl.x: late 5\n" in capsys.readouterr().err


def test_a_log_that_cannot_be_written_keeps_its_lines_until_it_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "learner.jsonl"
    logger = logging.getLogger("asyncrl.x")
    with logging_restored():
        path.symlink_to("/dev/full")
        setup_logging("learner", tmp_path, console=False)
        logger.info("no room")
        path.unlink()
        path.mkdir()
        logger.info("no file")
        path.rmdir()
        path.write_text("half a li")
        logger.info("room")
        tail = Tail(path)
        begins = f"log of process {os.getpid()} begins"
        assert [line["event"] for line in tail] == [begins, "no room", "no file", "room"]
        path.unlink()
        logger.info("a file of its own")
    assert [line["event"] for line in lines(path)] == ["a file of its own"]
    said = capsys.readouterr().err
    assert (
        said.count("cannot be written and is tried again: [Errno 28] No space left on device") == 1
        and "Traceback" not in said
    )


def test_an_exception_is_one_line_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with logging_restored():
        setup_logging("learner", tmp_path, console=False)
        try:
            raise ValueError("bad\nnews")
        except ValueError:
            logging.getLogger("asyncrl.x").exception("it broke", extra={"where": tmp_path})
    _, said = lines(tmp_path / "learner.jsonl")
    assert said["rank"] == 1 and said["event"] == "it broke" and str(tmp_path) in said["where"]
    assert said["exception"].startswith("Traceback") and said["exception"].endswith("ValueError: bad\nnews")


def test_secrets_reach_neither_the_file_nor_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCRL_STORE_PASSWORD", 'pass"word\\1')
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("FILE_KEY", "of-a-file\n")
    monkeypatch.setenv("SHORT_KEY", "asy")
    monkeypatch.setenv("judge_credentials", "hf_abcdef and_further")
    with logging_restored():
        setup_logging("learner", tmp_path, console=True)
        logger = logging.getLogger("asyncrl.x")
        logger.warning("hf_abcdef and_further, redis://hf_abcdef_further@host")
        logger.warning(
            "store redis://user:other-secret@host:6379/0 with %s",
            'pass"word\\1',
            extra={"token": "hf_abcdef"},
        )
        logger.warning("no header can hold %r", b"Bearer of-a-file\n")
        try:
            raise RuntimeError("hf_abcdef is refused at rediss://:other-secret@host")
        except RuntimeError:
            logger.exception("not let in")
    both = (tmp_path / "learner.jsonl").read_text() + capsys.readouterr().err
    for secret in ("word", "hf_abcdef", "other-secret", "further", "of-a-file"):
        assert secret not in both
    assert "redis://***@host:6379/0" in both and "rediss://***@host" in both and "asyncrl.x" in both
    assert lines(tmp_path / "learner.jsonl")[2]["token"] == "***"


HEALTHY = {
    "policy/entropy": 1.0, "mismatch/ess": 0.98,
    "group/zero_variance": 0.4, "groups/rejected_untrainable": 0.0, "groups/rejected_deadly": 0.0,
    "weights/probe_max": 0.01, "policy/skipped_steps": 0.0,
    "completions/length_mean": 200.0, "completions/truncated_share": 0.1, "time/step": 5.0,
    "buffer/audit_mismatch": 0.0, "weights/moved": 0.1, "preference/chosen_logprob": -100.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "metric", "still_fine", "too_much"),
    [
        ("entropy", "policy/entropy", 0.1, 0.0999),
        ("ess", "mismatch/ess", 0.5, 0.4999),
        ("probe", "weights/probe_max", 0.0375, 0.03751),
        ("skipped", "policy/skipped_steps", 2.0, 3.0),
        ("length", "completions/length_mean", 400.0, 400.1),
        ("truncated", "completions/truncated_share", 0.5, 0.501),
        ("audit", "buffer/audit_mismatch", 0.0, -1.0),
        ("moved", "weights/moved", 1.0, 1.1),
        ("chosen", "preference/chosen_logprob", -350.0, -350.1),
    ],
)
def test_each_alarm_has_cause_beyond_its_threshold_alone(
    name: str, metric: str, still_fine: float, too_much: float
) -> None:
    past = Past(first=HEALTHY, recent=[HEALTHY] * WINDOW, probe_limit=0.05)
    assert causes({**HEALTHY, metric: still_fine}, past) == dict.fromkeys(ALARMS, False)
    assert causes({**HEALTHY, metric: too_much}, past) == {**dict.fromkeys(ALARMS, False), name: True}
    assert causes({**HEALTHY, metric: math.nan}, past)[name] is False
    assert name not in causes({key: value for key, value in HEALTHY.items() if key != metric}, past)


def test_a_run_that_begins_with_little_entropy_is_told_by_nats() -> None:
    past = Past(first={"policy/entropy": 0.1}, recent=[], probe_limit=0.05)
    assert causes({"policy/entropy": 0.019}, past) == {"entropy": True}
    assert causes({"policy/entropy": 0.021}, past) == {"entropy": False}


def test_skipped_steps_are_added_up_over_the_window_and_slow_growth_is_no_explosion() -> None:
    alarms = Alarms()
    skipped = [
        alarms.watch({"policy/skipped_steps": float(step in (1, 5, 9))}, step)["alarm/skipped"]
        for step in range(1, 60)
    ]
    # The third begins it; it ends when the first has left the window, and the quiet steps after it.
    assert skipped.index(1.0) == 8 and skipped[8:].index(0.0) == WINDOW + 1 - 9 + QUIET_STEPS
    growing = Alarms()
    assert not any(
        growing.watch({"completions/length_mean": 100.0 * 1.05**step}, step)["alarm/length"]
        for step in range(100)
    )
    assert growing.watch({"completions/length_mean": 40_000.0}, 100) == {"alarm/length": 1.0}
    # A few first steps are nothing to compare with.
    for known, expected in ((WINDOW // 2 - 1, False), (WINDOW // 2, True)):
        past = Past(first={}, recent=[{"completions/length_mean": 9.0}] * known, probe_limit=0.05)
        assert causes({"completions/length_mean": 99.0}, past) == {"length": expected}


def test_flat_groups_ring_after_five_steps_of_nothing_else() -> None:
    alarms = Alarms()
    # A share of sequences is a sum of 1 / size in float32: of 50, it is just below 1.
    flat = [1.0] * 4 + [0.99] + [1.0, float(np.float32(1 / 50)) * 50] * 3
    assert [
        alarms.watch({"group/zero_variance": value}, step)["alarm/no_signal"]
        for step, value in enumerate(flat)
    ] == ([0.0] * 9 + [1.0] * 2)


def test_an_alarm_is_logged_once_when_it_begins_and_once_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alarms, seen = Alarms(), []
    for step in range(1, 41):
        bad = 10 <= step < 30 and step % 3  # it flickers
        seen.append(alarms.watch({**HEALTHY, "mismatch/ess": 0.2 if bad else 0.9}, step)["alarm/ess"])
        alarms.watch({"eval/accuracy": 0.5}, step)
    assert seen == [0.0] * 9 + [1.0] * (20 + QUIET_STEPS - 1) + [0.0] * (11 - QUIET_STEPS + 1)
    begins, ends = [entry.getMessage() for entry in caplog.records]
    assert begins == "step 10: alarm `ess` begins: mismatch/ess is 0.2; " + ALARMS["ess"].cure
    assert ends == "step 34: alarm `ess` ends: mismatch/ess is 0.9"


@pytest.mark.parametrize("better", [None, 20])
def test_responses_that_are_always_cut_off_are_said_at_the_start(better: int | None) -> None:
    """In a task of a fixed length all are; if one step ever was better, it is no such task."""
    alarms, seen = Alarms(), {}
    for step in range(1, 61):
        row = HEALTHY | {"completions/truncated_share": 0.2 if step == better else 1.0}
        if alarms.watch(row, step)["alarm/truncated"]:
            seen[step] = True
    first = list(range(1, TOLD_STEPS + QUIET_STEPS))
    # After `WINDOW` steps the better one is forgotten.
    later = [] if better is None else list(range(21, 21 + WINDOW + QUIET_STEPS - 1))
    assert list(seen) == first + later


def test_responses_that_come_to_be_cut_off_are_said_as_long_as_they_are() -> None:
    alarms, began = Alarms(), 11
    for step in range(1, 4 * WINDOW):
        row = {"completions/truncated_share": 0.1 if step < began else 1.0}
        assert alarms.watch(row, step) == {"alarm/truncated": float(step >= began)}


def test_the_first_entropy_is_the_first_that_is_a_number() -> None:
    alarms = Alarms()
    assert alarms.watch({"policy/entropy": math.nan}, 1) == {"alarm/entropy": 0.0}
    assert alarms.watch({"policy/entropy": 2.0}, 2) == {"alarm/entropy": 0.0}
    assert alarms.watch({"policy/entropy": 0.19}, 3) == {"alarm/entropy": 1.0}


def test_alarms_stand_beside_the_metrics_of_a_step_and_nowhere_else(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics" / "learner.jsonl"
    trackers = open_trackers(TelemetryConfig(), "a", tmp_path, RESOLVED, key_id="5a17")
    trackers.log({**HEALTHY, "weights/probe_max": 0.04, "weights/probe_limit": 0.05}, step=1)
    trackers.log({"eval/accuracy": 0.5}, step=1)
    trackers.log({"completions/truncated_share": 0.9})
    trackers.close()
    first, evaluation, by_time = lines(metrics)
    assert ringing(first) == ["probe"] and first["alarm/entropy"] == 0.0
    assert not [name for name in (*evaluation, *by_time) if name.startswith("alarm/")]


def test_bins_are_told_from_numbers_and_gaps_are_empty() -> None:
    numbers, histograms = split({**LAGS, "staleness/in_queue": 0.75, "eval/pass@8": 0.5, "reward/mean": 1.0})
    assert numbers == {"staleness/in_queue": 0.75, "eval/pass@8": 0.5, "reward/mean": 1.0}
    (lag,) = histograms.values()
    assert list(histograms) == ["staleness/in_queue/histogram"] and lag == (0.625, 0.0, 0.375)
    assert sum(value * share for value, share in enumerate(lag)) == numbers["staleness/in_queue"]


@pytest.mark.parametrize("end", ["1700000000", "100", "9" * 5000, "٣"])
def test_a_number_that_is_no_bin_stays_in_its_name(end: str) -> None:
    metrics = {f"hook/at/{end}": 1.0, "hook/lag/99": 0.5}
    numbers, histograms = split(metrics)
    assert numbers == {f"hook/at/{end}": 1.0}
    assert histograms == {"hook/lag/histogram": (*([0.0] * 99), 0.5)}
    assert [prometheus_name(name)[1] for name in metrics] == [{}, {"bin": "99"}]


def test_a_table_of_samples_is_due_every_ten_steps_of_its_kind_and_again_after_going_back() -> None:
    last: dict[str, int] = {}
    shown = [step for step in (1, 2, 10, 11, 21, 12) if table_rows([record(step=step)], last)]
    assert shown == [1, 11, 21, 12] and table_rows([], last) == []
    (row,) = table_rows([record(step=12, kind="eval")], last)
    assert dict(zip(COLUMNS, row, strict=True))["versions"] == "[(0, 3), (1, 2)]"


def test_each_named_set_has_its_own_table_of_samples(tmp_path: Path) -> None:
    config = TelemetryConfig(tensorboard=True)
    trackers = open_trackers(config, "a", tmp_path, RESOLVED, key_id="5a17")
    for name in ("math", "words"):
        trackers.samples([record(kind="eval", eval_set=name, response=f"of {name}")])
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in ("math", "words"):
        (shown,) = events.Tensors(f"samples/eval/{name}/text_summary")
        assert f"of {name}".encode() in shown.tensor_proto.string_val[0]
