"""What `asyncrl logs` shows of a run."""

import json
from pathlib import Path

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
