"""A test process that is killed is a failure with its name, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import HANG, wait_until

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
TESTS = """
import os, signal, subprocess

def start(name):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(f"{name}.part", "w").write(f"{child.pid} {os.getpid()}")
    os.rename(f"{name}.part", name)

def test_that_is_killed():
    start("killed")
    os.kill(os.getpid(), signal.SIGKILL)

def test_that_forgets_a_process():
    start("forgotten")

def test_that_fails():
    raise LookupError("told early")

def test_that_takes_long():
    start("long")
    HANG
""".replace("HANG", HANG)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "test_a.py").write_text(TESTS)

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-p", "tests.support.leftovers", *options]
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )

    return run


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_killed_process_of_tests_is_a_failure_and_the_others_are_run(run, tmp_path):
    done = run("-n", "1", "-k", "killed or forgets")
    said, _ = done.communicate(timeout=120)
    assert done.returncode == 1 and "1 failed, 1 passed" in said, said
    assert "crashed while running 'test_a.py::test_that_is_killed'" in said
    for name in ("killed", "forgotten"):
        child, _ = map(int, (tmp_path / name).read_text().split())
        wait_until(lambda child=child: is_gone(child))


@pytest.mark.parametrize("victim", ["worker", "controller", "alone"])
def test_a_killed_pytest_has_named_failures_and_what_it_started_is_gone(run, tmp_path, victim):
    running = run("-k", "fails or long", *([] if victim == "alone" else ["-n", "1"]))
    wait_until((tmp_path / "long").exists)
    child, parent = map(int, (tmp_path / "long").read_text().split())
    assert (parent == running.pid) is (victim == "alone")
    os.kill(parent if victim == "worker" else running.pid, signal.SIGKILL)
    for pid in (child, parent):
        wait_until(lambda pid=pid: is_gone(pid))
    running.kill()
    said, _ = running.communicate(timeout=60)
    assert "test_a.py::test_that_fails, call: " in said and "LookupError: told early" in said


@pytest.mark.parametrize(("free_bytes", "ran"), [(1 << 20, 1), (1 << 40, 2)])
def test_a_full_disk_ends_the_run_with_the_reason(run, tmp_path, free_bytes, ran):
    fails = "raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))"
    (tmp_path / "test_a.py").write_text(
        f"import errno, os\ndef test_a():\n    {fails}\ndef test_b():\n    {fails}\n"
    )
    (tmp_path / "conftest.py").write_text(
        f"import shutil\nfrom types import SimpleNamespace\n"
        f"shutil.disk_usage = lambda path: SimpleNamespace(free={free_bytes})\n"
    )
    for options in ((), ("-n", "1")):
        done = run(*options)
        said, _ = done.communicate(timeout=120)
        assert done.returncode == 1 and f"{ran} failed" in said, said
        assert ("is full: 1 MiB free; free some space, or set TMPDIR" in said) is (ran == 1), said
