"""Real children, tiny ones: restart, crash loop, a user's mistake, and nobody left behind."""

import os
import sys
import time
from pathlib import Path

import pytest

from asyncrl.errors import RunError
from asyncrl.supervisor import USER_ERROR, ProcessSpec, Supervisor


def spec(name: str, code: str, tmp_path: Path, **more: object) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        argv=[sys.executable, "-c", code],
        env=dict(os.environ),
        log_path=tmp_path / f"{name}.log",
        grace_s=2.0,
        **more,  # type: ignore[arg-type]
    )


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_process_that_dies_is_started_again_and_the_run_ends_with_the_learner(tmp_path):
    marker = tmp_path / "second-try"
    flaky = f"import pathlib, sys; p = pathlib.Path({str(marker)!r}); e = p.exists(); p.touch(); sys.exit(0 if e else 7)"
    with Supervisor([spec("learner", flaky, tmp_path, ends_run=True)], max_restarts=2) as supervisor:
        supervisor.run(tick_s=0.02)
        assert supervisor.restarts() == {"learner": 1}
    assert marker.exists()


def test_a_crash_loop_ends_the_run_with_the_last_lines_of_the_log(tmp_path):
    crash = spec("learner", "import sys; print('the disk is on fire'); sys.exit(7)", tmp_path, ends_run=True)
    with Supervisor([crash], max_restarts=1) as supervisor, pytest.raises(RunError, match=r"(?s)died 2 times.*disk is on fire"):
        supervisor.run(tick_s=0.02)


def test_a_users_mistake_is_not_repeated(tmp_path):
    wrong = spec("learner", f"import sys; print('no such model'); sys.exit({USER_ERROR})", tmp_path, ends_run=True)
    with Supervisor([wrong], max_restarts=5) as supervisor, pytest.raises(RunError, match="no such model"):
        supervisor.run(tick_s=0.02)
    assert supervisor.restarts() == {"learner": 0}


def test_stopping_ends_children_and_grandchildren(tmp_path):
    family = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    specs = [spec("family", family, tmp_path), spec("stubborn", stubborn, tmp_path)]
    with Supervisor(specs, max_restarts=0) as supervisor:
        ready_by_s = time.monotonic() + 10

        def stop_when_up() -> None:
            up = all(one.log_path.exists() and one.log_path.read_text().strip() for one in specs)
            if up or time.monotonic() > ready_by_s:
                supervisor.request_stop("test")

        supervisor.run(stop_when_up, tick_s=0.02)
        pids = [*supervisor.pids().values(), int((tmp_path / "family.log").read_text())]
    deadline_s = time.monotonic() + 3
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_learner_that_finishes_ends_the_others(tmp_path):
    specs = [spec("learner", "pass", tmp_path, ends_run=True), spec("g0", "import time; time.sleep(60)", tmp_path)]
    changes: list[dict[str, int]] = []
    with Supervisor(specs, max_restarts=0, on_change=lambda pids: changes.append(dict(pids))) as supervisor:
        supervisor.run(tick_s=0.02)
        assert list(supervisor.pids()) == ["g0"]
    assert supervisor.pids() == {}
    assert changes[-1] == {}
