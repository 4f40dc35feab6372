"""Real children, tiny ones: restart, crash loop, a user's mistake, and nobody left behind."""

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.errors import RunError
from asyncrl.hosting.supervisor import FAULT_FOUND, SAME_FAULTS, USER_ERROR, ProcessSpec, Supervisor


def spec(name: str, code: str, tmp_path: Path, *, has_standby: bool = False, **more: object) -> ProcessSpec:
    argv = [sys.executable, "-c", code]
    return ProcessSpec(
        name=name,
        argv=argv,
        standby_argv=[*argv, "--standby"] if has_standby else None,
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
    flaky = (
        f"import pathlib, sys; p = pathlib.Path({str(marker)!r}); e = p.exists(); p.touch(); sys.exit(0 if "
        "e else 7)"
    )
    with Supervisor([spec("learner", flaky, tmp_path, ends_run=True)], max_restarts=2) as supervisor:
        supervisor.run(tick_s=0.02)
        assert supervisor.deaths() == {"learner": 1}
    assert marker.exists()


def test_a_crash_loop_ends_the_run_with_the_last_lines_of_the_log(tmp_path):
    crash = spec("learner", "import sys; print('the disk is on fire'); sys.exit(7)", tmp_path, ends_run=True)
    with (
        Supervisor([crash], max_restarts=1) as supervisor,
        pytest.raises(RunError, match=r"(?s)died 2 times.*disk is on fire"),
    ):
        supervisor.run(tick_s=0.02)


def test_a_users_mistake_is_not_repeated(tmp_path):
    wrong = spec(
        "learner", f"import sys; print('no such model'); sys.exit({USER_ERROR})", tmp_path, ends_run=True
    )
    with Supervisor([wrong], max_restarts=5) as supervisor, pytest.raises(RunError, match="no such model"):
        supervisor.run(tick_s=0.02)
    assert supervisor.deaths() == {"learner": 0}


STANDBY = """
import os, pathlib, sys, time
ready, result = pathlib.Path({ready!r}), pathlib.Path({result!r})
if "--standby" in sys.argv:
    ready.exists() or ready.write_text(str(os.getpid()))  # a second one may start before the run ends
    result.write_text(f"{{sys.stdin.readline()!r}} {{os.getpid()}}")
else:
    while not ready.exists():
        time.sleep(0.01)
    time.sleep({lives_s})
    sys.exit(7)
"""


def test_a_standby_takes_the_place_of_the_one_that_died(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.hosting.supervisor._STANDBY_AFTER_S", 0.0)
    ready, result = tmp_path / "ready", tmp_path / "result"
    code = STANDBY.format(ready=str(ready), result=str(result), lives_s=0.1)
    with Supervisor(
        [spec("learner", code, tmp_path, ends_run=True, has_standby=True)], max_restarts=1
    ) as supervisor:
        supervisor.run(tick_s=0.02)
        assert supervisor.deaths() == {"learner": 1}
    assert result.read_text() == f"'\\n' {ready.read_text()}"


def test_a_standby_ends_with_the_run_and_is_not_called(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.hosting.supervisor._STANDBY_AFTER_S", 0.0)
    ready, result = tmp_path / "ready", tmp_path / "result"
    code = STANDBY.format(ready=str(ready), result=str(result), lives_s=60)
    with Supervisor(
        [spec("learner", code, tmp_path, ends_run=True, has_standby=True)], max_restarts=1
    ) as supervisor:
        supervisor.run(
            lambda: supervisor.request_stop("enough") if ready.exists() and ready.read_text() else None,
            tick_s=0.02,
        )
    assert not is_alive(int(ready.read_text()))
    assert not result.exists()


def test_a_standby_that_cannot_be_started_harms_nobody(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("asyncrl.hosting.supervisor._STANDBY_AFTER_S", 0.05)
    tries = []

    def popen(argv: list[str], **options: object) -> "subprocess.Popen[bytes]":
        if "--standby" in argv:
            tries.append(len(os.listdir("/proc/self/fd")))
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(argv, **options)  # type: ignore[call-overload, no-any-return]

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    one = spec("learner", "import time; time.sleep(60)", tmp_path, ends_run=True, has_standby=True)
    with Supervisor([one], max_restarts=1) as supervisor:
        supervisor.run(lambda: supervisor.request_stop("enough") if len(tries) >= 3 else None, tick_s=0.02)
        assert supervisor.deaths() == {"learner": 0}
    assert "a standby of learner cannot be started and is tried again" in caplog.text
    assert tries[0] == tries[-1], "no descriptor is left of the first"


def test_a_standby_that_cannot_live_harms_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.hosting.supervisor._STANDBY_AFTER_S", 0.05)
    tries = tmp_path / "tries"
    code = f"""
import pathlib, sys, time
tries = pathlib.Path({str(tries)!r})
with tries.open("a") as file:
    file.write("s" if "--standby" in sys.argv else "l")
if "--standby" in sys.argv:
    sys.exit(1)
until_s = time.monotonic() + 10
while time.monotonic() < until_s and tries.read_text().count("s") < 2:
    time.sleep(0.01)
sys.exit(7 if tries.read_text().count("l") == 1 else 0)
"""
    with Supervisor(
        [spec("learner", code, tmp_path, ends_run=True, has_standby=True)], max_restarts=5
    ) as supervisor:
        supervisor.run(tick_s=0.02)
        # One more for a standby that takes the place before it has ended.
        assert supervisor.deaths()["learner"] >= 1
    assert tries.read_text().count("l") == 2


def test_stopping_ends_children_and_grandchildren(tmp_path):
    family = (
        "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); "
        "time.sleep(60)"
    )
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
        "time.sleep(60)"
    )
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
    specs = [
        spec("learner", "pass", tmp_path, ends_run=True),
        spec("g0", "import time; time.sleep(60)", tmp_path),
    ]
    changes: list[dict[str, int]] = []
    with Supervisor(specs, max_restarts=0, on_change=lambda pids: changes.append(dict(pids))) as supervisor:
        supervisor.run(tick_s=0.02)
        assert list(supervisor.pids()) == ["g0"]
    assert supervisor.pids() == {}
    assert changes[-1] == {}


def until(supervisor: Supervisor, condition, wait_s: float = 60.0) -> None:
    """Supervise until `condition`."""
    ends_s = time.monotonic() + wait_s

    def tick() -> None:
        if condition():
            supervisor.request_stop("as expected")
        assert time.monotonic() < ends_s, "it did not come to this"

    supervisor.run(tick, tick_s=0.02)
    supervisor._stop_reason = None


UP = "import pathlib, signal, sys, time; {before}; print('up', flush=True); time.sleep(600)"


def test_processes_come_and_go_while_the_run_goes_on(tmp_path):
    polite = UP.format(
        before="signal.signal(signal.SIGTERM, lambda *_: (print('thanks', flush=True), sys.exit(143)))"
    )
    stubborn = UP.format(before="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    learner = spec("learner", "import time; time.sleep(600)", tmp_path, ends_run=True)
    with Supervisor([learner], max_restarts=0) as supervisor:
        for name, code in (("g0", polite), ("g1", stubborn)):
            supervisor.add(spec(name, code, tmp_path))
        with pytest.raises(RunError, match="already"):
            supervisor.add(spec("g1", polite, tmp_path))
        logs = [tmp_path / "g0.log", tmp_path / "g1.log"]
        until(supervisor, lambda: all(log.exists() and "up" in log.read_text() for log in logs))
        pids = supervisor.pids()
        supervisor.drain("g0")
        supervisor.drain("g1")
        assert supervisor.names == {"learner": True, "g0": False, "g1": False}
        until(supervisor, lambda: "g0" not in supervisor.names and "g1" not in supervisor.names)
        assert "thanks" in logs[0].read_text()
        assert not is_alive(pids["g0"]) and not is_alive(pids["g1"]), "who does not go is killed"
        assert supervisor.pids().keys() == {"learner"} and supervisor.deaths() == {"learner": 0}, (
            "nobody died or came back"
        )
        supervisor.add(spec("g0", polite, tmp_path))
        until(supervisor, lambda: logs[0].read_text().count("up") == 2)


@pytest.mark.parametrize("status", [7, USER_ERROR])
def test_a_process_that_was_added_and_cannot_run_is_left_out(tmp_path, status):
    with Supervisor(
        [spec("learner", "import time; time.sleep(600)", tmp_path, ends_run=True)], max_restarts=0
    ) as supervisor:
        supervisor.add(spec("g0", f"import sys; sys.exit({status})", tmp_path, is_extra=True))
        until(supervisor, lambda: "g0" not in supervisor.names)
        assert supervisor.pids().keys() == {"learner"}


FAULT = (
    "import sys; print('noise'); print('asyncrl.errors.CheckpointError: step 7 holds {what}'); "
    "sys.exit({status})"
)


def test_the_same_fault_again_and_again_ends_the_run_early_and_with_its_words(tmp_path, caplog):
    loop = spec(
        "learner",
        "import os\n" + FAULT.format(what="' + str(os.getpid()) + ' tensors", status=FAULT_FOUND),
        tmp_path,
    )
    with Supervisor([loop], max_restarts=50) as supervisor, pytest.raises(RunError) as caught:
        supervisor.run(tick_s=0.02)
    assert re.match(
        r"learner died 3 times in a row of the same fault, and would again: CheckpointError: step 7 holds \d+ tensors; "
        r"correct that",
        str(caught.value),
    )
    deaths = [record.getMessage() for record in caplog.records if "died" in record.getMessage()]
    assert len(deaths) == SAME_FAULTS - 1, "a number that differs each time is the same fault"
    assert re.search(
        r"learner died \(exit status 3\); its last message: CheckpointError: step 7 holds .*; restart 1 of 50 in",
        deaths[0],
    )


def test_faults_that_differ_or_are_none_of_these_use_up_the_restarts(tmp_path):
    tries = tmp_path / "tries"
    count = (
        f"import pathlib; p = pathlib.Path({str(tries)!r}); p.open('a').write('x'); n = p.stat().st_size - "
        "1\n"
    )
    differ = count + FAULT.format(what="' + 'abcdefgh'[n] + '", status=FAULT_FOUND)
    for code in (differ, FAULT.format(what="nothing", status=1)):
        with (
            Supervisor([spec("learner", code, tmp_path)], max_restarts=3) as supervisor,
            pytest.raises(RunError, match="died 4 times"),
        ):
            supervisor.run(tick_s=0.02)
