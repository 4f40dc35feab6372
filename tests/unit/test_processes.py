"""Processes that end with ours."""

import subprocess
import sys

import psutil

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
