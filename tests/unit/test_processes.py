"""Processes that end with ours."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import asyncrl
from asyncrl.environments import episode_worker
from asyncrl.hosting.processes import kill_group, module_argv
from tests.support.waiting import HANG, wait_until_ended

PARENT = """
import subprocess, sys, time
from asyncrl.hosting.processes import bound_to_us
child = subprocess.Popen(bound_to_us([sys.executable, "-c", "print('up', flush=True); HANG"]))
print(child.pid, flush=True)
HANG
""".replace("HANG", HANG)


def test_a_bound_process_dies_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = {parent.stdout.readline().strip() for _ in range(2)}
        (pid,) = lines - {"up"}
        child = psutil.Process(int(pid))
        assert child.cmdline()[:2] == [sys.executable, "-c"] and "bound" not in str(child.cmdline())
        parent.kill()
    wait_until_ended([child])


def test_a_process_of_another_user_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own starter has ended, for example sudo."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    server = episode_worker._ForkServer(None, [], "text")  # type: ignore[arg-type]
    server._own = episode_worker._children()
    with subprocess.Popen(["sleep", "600"]) as other, contextlib.ExitStack() as ending:
        ending.callback(other.kill)
        with monkeypatch.context() as of_another:
            of_another.setattr(os, "killpg", refuse)
            of_another.setattr(os, "kill", refuse)
            kill_group(other.pid)
            assert server._end_orphans() and other.poll() is None
        while server._end_orphans():
            pass
        assert episode_worker._children() == server._own


def test_no_process_of_ours_takes_modules_of_the_working_directory() -> None:
    sources = {path: path.read_text() for path in Path(asyncrl.__path__[0]).rglob("*.py")}
    assert [path.name for path, text in sources.items() if '"-m",' in text] == ["processes.py"]
    assert module_argv("a.b", "c") == [sys.executable, "-P", "-m", "a.b", "c"]
