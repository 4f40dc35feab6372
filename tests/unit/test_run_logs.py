"""What `asyncrl logs` shows of a run."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.errors import RunError
from asyncrl.results.recorded import LAST_BYTES, logs_of
from asyncrl.run.directory import RunDirectory
from asyncrl.run.lock import RunLock
from asyncrl.telemetry.status import StatusSnapshot, status_json


def log(directory: RunDirectory, process: str, *records: tuple[str, str, str], **fields: str) -> None:
    with (directory.logs / f"{process}.jsonl").open("a") as file:
        for time, level, event in records:
            about = {"time": f"2026-01-31T{time}.5Z", "level": level, "process": process, "event": event}
            file.write(json.dumps(about | fields) + "\n")


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create(fresh=True)
    made.config.write_text("run: {name: run}\n")
    return made


def end(directory: RunDirectory) -> None:
    snapshot = StatusSnapshot(
        run="run", state="finished", step=3, total_steps=3, version=3, started_at=0.0, updated_at=1.0, pid=1
    )
    directory.status.write_text(json.dumps(status_json(snapshot)))


def test_warnings_of_all_processes_come_in_the_order_of_their_times(directory: RunDirectory) -> None:
    log(directory, "learner", ("12:00:01", "info", "begins"), ("12:00:03", "warning", "slow"))
    log(directory, "g0", ("12:00:02", "error", "ticket 3 failed"), exception="Traceback\nValueError: 3")
    with (directory.logs / "g1.jsonl").open("wb") as file:
        file.write(b'{"level": "error"}\nno JSON\n{"half')
    assert "".join(logs_of(directory.path, None, follow=False)) == (
        "2026-01-31T12:00:02 g0 ERROR ticket 3 failed\nTraceback\nValueError: 3\n"
        "2026-01-31T12:00:03 learner WARNING slow\n"
        "None None ERROR None\n"
    )


def test_no_log_line_moves_the_cursor_of_a_terminal(directory: RunDirectory) -> None:
    said = "ValueError: \x1b[2J \u202e"
    log(directory, "g0", ("12:00:02", "error", "it said \x1b]0;a\x07\r"), exception=f"Traceback\n{said}")
    assert "".join(logs_of(directory.path, None, follow=False)) == (
        "2026-01-31T12:00:02 g0 ERROR it said ␛]0;a␇␍\nTraceback\nValueError: ␛[2J \\u202e\n"
    )


def test_a_process_shows_what_it_has_printed_last(directory: RunDirectory) -> None:
    (directory.logs / "g0.out").write_bytes(b"a" * LAST_BYTES + b"b\xff\n")
    (text,) = logs_of(directory.path, "g0", follow=False)
    assert text == "a" * (LAST_BYTES - 3) + "b�\n"


def test_a_character_that_arrives_in_parts_is_whole(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(data: bytes) -> None:
        with (directory.logs / "g0.out").open("ab") as file:
            file.write(data)

    lock = RunLock(directory.supervisor_lock)
    waits = iter([lambda: write(b"\x88\n"), lambda: lock.release()])
    monkeypatch.setattr("asyncrl.results.recorded.time.sleep", lambda seconds: next(waits)())
    write(b"\xe2\x96")
    assert "".join(logs_of(directory.path, "g0", follow=True)) == "█\n"


def test_only_lines_that_are_shown_stay_in_memory(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Record(dict[str, str]):
        """A dictionary that a weak reference can follow."""

    read: list[weakref.ref[Record]] = []
    most = 0

    def lines() -> Iterator[Record]:
        nonlocal most
        for number in range(100):
            record = Record(level="info" if number else "warning", event=str(number))
            read.append(weakref.ref(record))
            most = max(most, sum(one() is not None for one in read))
            yield record

    tails = SimpleNamespace(read=lambda: {"g0": lines()})
    monkeypatch.setattr("asyncrl.results.recorded.Tails", lambda _: tails)
    assert "".join(logs_of(directory.path, None, follow=False)) == "None None WARNING 0\n"
    assert len(read) == 100 and most <= 3, "the shown line, the last one and the new one"


def test_a_name_without_output_is_told_which_there_are(directory: RunDirectory) -> None:
    for name in ("learner", "generators-1"):
        (directory.logs / f"{name}.out").touch()
    with pytest.raises(RunError, match=r"no output of `g7`; it has that of: generators-1, learner\. A host"):
        logs_of(directory.path, "g7", follow=False)


@pytest.mark.parametrize("name", [None, "g0"])
def test_new_lines_are_shown_until_the_run_ends(
    directory: RunDirectory, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(number: int) -> None:
        log(directory, "g0", (f"12:00:0{number}", "warning", f"line {number}"))
        with (directory.logs / "g0.out").open("a") as file:
            file.write(f"line {number}\n")

    end(directory)  # of an earlier start
    lock = RunLock(directory.supervisor_lock)
    waits = iter([lambda: write(2), lambda: (write(3), lock.release())])
    monkeypatch.setattr("asyncrl.results.recorded.time.sleep", lambda seconds: next(waits)())
    write(1)
    shown = "".join(logs_of(directory.path, name, follow=True)).splitlines()
    assert [line[-6:] for line in shown] == ["line 1", "line 2", "line 3"]
