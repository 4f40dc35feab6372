"""Processes that end with ours."""

import contextlib
import subprocess
import sys
import time

import psutil

PARENT = """
import subprocess, sys, time
from asyncrl.hosting.processes import bound_to_us
child = subprocess.Popen(bound_to_us([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]))
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_bound_process_dies_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = {parent.stdout.readline().strip() for _ in range(2)}
        (pid,) = lines - {"up"}
        child = psutil.Process(int(pid))
        assert child.cmdline()[:2] == [sys.executable, "-c"] and "bound" not in str(child.cmdline())
        parent.kill()
    deadline_s = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s, "the child outlived its parent"
            time.sleep(0.02)
