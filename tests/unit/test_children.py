"""Real processes of this host: the life of a run, signals, standbys, and nothing that is left."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from asyncrl.hosting import children
from asyncrl.hosting.children import ProcessSpec, ThisHost, family
from asyncrl.hosting.progress import Limits
from asyncrl.hosting.supervisor import Supervisor
from tests.support.virtual_host import deaths
from tests.support.waiting import LONG_S, stop, wait_until

HEAD = """
import os, pathlib, signal, subprocess, sys
from asyncrl.hosting.progress import Pace, attach, beat, begin
attach()
def family():
    print("child", subprocess.Popen(["sleep", "600"]).pid, flush=True)
def works():
    begin("work")
    print("up", os.getpid(), flush=True)
    while True:
        beat()
        signal.sigtimedwait([], 0.02)
"""


def spec(code: str, tmp_path: Path, **more: object) -> ProcessSpec:
    argv = [sys.executable, "-c", HEAD + code]
    log_path = tmp_path / "one.log"
    return ProcessSpec(name="one", argv=argv, env=dict(os.environ), log_path=log_path, grace_s=2.0, **more)  # type: ignore[arg-type]


def said(spec: ProcessSpec, word: str) -> list[int]:
    """The numbers that the process printed behind a word."""
    lines = spec.log_path.read_text().splitlines() if spec.log_path.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(word) and len(line.split()) == 2]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextmanager
def started(spec: ProcessSpec, *, stands_by: bool = False):
    process = ThisHost().start(spec, stands_by=stands_by)
    try:
        yield process
    finally:
        process.kill()
        wait_until(lambda: process.poll() is not None)
        process.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


LIFE = """
tries = pathlib.Path({tries!r})
with tries.open("a") as file:
    file.write("x")
family()
if tries.stat().st_size == 1:
    sys.exit(7)
if tries.stat().st_size == 2:
    begin("wait for a lock")
    signal.pause()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
works()
"""


def test_one_life(tmp_path, caplog):
    """It dies, is started again, hangs, is killed with its child, works, and refuses to leave."""
    one, before = spec(LIFE.format(tries=str(tmp_path / "tries")), tmp_path), descriptors()
    with Supervisor([one], max_restarts=2, limits=Limits(hang_s=5.0, slow_s=600.0)) as supervisor:
        supervisor.run(lambda: supervisor.request_stop("it works") if said(one, "up") else None)
        assert deaths(supervisor) == {"one": 2}
        assert list(supervisor.pids().values()) == said(one, "up")
        children = said(one, "child")
        assert len(children) == 3 and all(map(is_gone, children[:2])) and not is_gone(children[2])
    wait_until(lambda: all(map(is_gone, [*children, *said(one, "up")])))
    assert descriptors() == before
    assert "one died (exit status 7)" in caplog.text
    assert "one died (one made no progress for 5 s in `wait for a lock`)" in caplog.text


def test_a_process_is_asked_to_leave_and_its_session_is_killed(tmp_path):
    polite = "signal.signal(signal.SIGTERM, lambda *_: (print('thanks', 0, flush=True), sys.exit(143)))\n"
    one = spec(f"{polite}family()\nworks()", tmp_path)
    with started(one) as process:
        wait_until(lambda: said(one, "up"))
        assert said(one, "up") == [process.pid] and os.getsid(process.pid) == process.pid
        process.terminate()
        wait_until(lambda: process.poll() is not None)
        assert process.poll() == 143 and said(one, "thanks") == [0]
        (child,) = said(one, "child")
        assert not is_gone(child)
        process.kill()
        wait_until(lambda: is_gone(child))
        process.kill()


def test_a_stopped_process_can_be_killed(tmp_path):
    one = spec("works()", tmp_path)
    with started(one) as process:
        wait_until(lambda: said(one, "up"))
        stop(process.pid)
        process.terminate()
        process.kill()
        wait_until(lambda: process.poll() is not None)
        assert process.poll() == -signal.SIGKILL


def test_each_worker_has_a_place_for_its_signs(tmp_path):
    code = """
if os.fork() == 0:
    os.environ["ASYNCRL_PROGRESS"] = os.environ["ASYNCRL_PROGRESS"].replace(":0", ":1")
    attach()
    begin("wait for a lock")
    signal.pause()
works()
"""
    with started(spec(code, tmp_path, workers=("rank 0", "rank 1"))) as process:
        doing = {"rank 0": "work", "rank 1": "wait for a lock"}
        wait_until(lambda: {name: sign.doing for name, sign in process.signs().items()} == doing)


STANDBY = """
from asyncrl.hosting.rank_group import wait_until_needed
print("waits", os.getpid(), flush=True)
line = wait_until_needed()
assert line == ""
works()
"""


def standby(tmp_path: Path) -> ProcessSpec:
    return spec("sys.exit('not a standby')", tmp_path, standby_argv=[sys.executable, "-c", HEAD + STANDBY])


def test_a_standby_takes_over_when_it_is_called(tmp_path):
    one = standby(tmp_path)
    with started(one, stands_by=True) as process:
        wait_until(lambda: process.signs()["one"].doing == "stand by")
        assert not said(one, "up")
        process.take_over()
        wait_until(lambda: said(one, "up"))
        assert said(one, "up") == said(one, "waits") == [process.pid]


def test_a_standby_leaves_if_it_is_not_called(tmp_path):
    one, before = standby(tmp_path), descriptors()
    process = ThisHost().start(one, stands_by=True)
    wait_until(lambda: process.signs()["one"].doing == "stand by")
    process.close()
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == 0 and not said(one, "up") and descriptors() == before


def test_a_dead_standby_cannot_be_called(tmp_path):
    with started(standby(tmp_path), stands_by=True) as process:
        process.kill()
        wait_until(lambda: process.poll() is not None)
        with pytest.raises(BrokenPipeError):
            process.take_over()


@pytest.mark.parametrize("stands_by", [False, True])
def test_a_process_that_cannot_be_started_leaves_no_descriptor(tmp_path, stands_by):
    argv, before = [str(tmp_path / "missing")], descriptors()
    one = ProcessSpec(name="one", argv=argv, standby_argv=argv, env={}, log_path=tmp_path / "one.log")
    for _ in range(3):
        with pytest.raises(OSError, match="missing"):
            ThisHost().start(one, stands_by=stands_by)
    assert descriptors() == before


def test_output_goes_to_standard_error_if_the_log_cannot_be_opened(tmp_path, capfd, caplog):
    one = ProcessSpec(
        name="one", argv=["echo", "hello"], env=dict(os.environ), log_path=tmp_path / "missing" / "one.log"
    )
    with started(one) as process:
        wait_until(lambda: process.poll() is not None)
    assert capfd.readouterr().err == "hello\n" and "cannot be written" in caplog.text


def test_a_descendant_that_may_not_be_killed_yet_does_not_keep_the_others_alive(monkeypatch):
    kill, refused = psutil.Process.kill, list[int]()

    def refuse_first(process):
        if not refused:
            refused.append(process.pid)
            raise psutil.AccessDenied(process.pid)
        kill(process)

    with family():
        monkeypatch.setattr(psutil.Process, "kill", refuse_first)
        started = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    assert refused and all(process.wait(LONG_S) in (-signal.SIGKILL, 0) for process in started)


def test_a_reaper_that_fails_does_not_end_the_run_and_is_tried_again(monkeypatch, caplog):
    monkeypatch.setattr(children, "LOOK_S", 0.0)
    asked = []

    def refused(self, recursive=False):
        asked.append(recursive)
        raise OSError(errno.EMFILE, "Too many open files")

    with family() as members:
        with monkeypatch.context() as full:
            full.setattr(psutil.Process, "children", refused)
            members.tend()
            members.tend()
        assert len(asked) == 2 and caplog.text.count("the reaper failed and will be tried again") == 1
        with caplog.at_level("INFO"):
            members.tend()
    assert "the reaper works again, after 2 failures" in caplog.text
