"""Child processes on Linux: nothing outlives its parent, nothing is waited for without a bound."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 10.0
_SECRET_ENDINGS = ("TOKEN", "KEY", "PASSWORD", "SECRET", "CREDENTIALS")


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when the one that started it dies, however it dies.

    Args:
        parent_pid: who the parent was when it started us; if it is gone already, exit at once. The kernel
            only reports deaths after the call, and a parent may die before it.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def die_with_spawner() -> None:
    """The same in a process that `multiprocessing` has spawned, which would not notice; elsewhere nothing."""
    if (parent := multiprocessing.parent_process()) is not None:
        die_with_parent(parent.pid)


def close_to_others() -> None:
    """Have the kernel refuse our memory and descriptors (ptrace, /proc/PID/mem, /proc/PID/fd) to processes of
    our own user."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")


def adopt_orphans(wanted: bool) -> None:
    """Have the kernel make descendants whose parents have died our children, or no longer."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def is_secret(name: str) -> bool:
    """Whether the value of an environment variable of this name is nobody else's business."""
    return name.upper().endswith(_SECRET_ENDINGS)


def public_environment() -> dict[str, str]:
    """Our environment without secrets: for processes that need none."""
    return {name: value for name, value in os.environ.items() if not is_secret(name)}


def stop_process(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """As `stop_processes`; one that the kernel holds on to is left to it."""
    stop_processes([process], grace_s=grace_s)


def stop_processes(processes: Sequence["subprocess.Popen[bytes]"], *, grace_s: float) -> list[int]:
    """Terminate all, wait at most `grace_s` for all together, then kill. Returns the ids of those that the
    kernel holds on to."""
    if grace_s:
        for process in processes:
            process.terminate()
        _wait(processes, grace_s)
    for process in processes:
        process.kill()
    _wait(processes, _REAP_S)
    return [process.pid for process in processes if process.poll() is None]


def _wait(processes: Iterable["subprocess.Popen[bytes]"], wait_s: float) -> None:
    until_s = time.monotonic() + wait_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, until_s - time.monotonic()))


def find_holder(path: Path) -> "psutil.Process | None":
    """The process that holds the lock in the file at `path`, as far as one can be seen: of this host,
    container and user.

    The kernel says so: it does not matter what the file holds, whether it was deleted meanwhile, or what
    clocks do.
    """
    place = path.parent.resolve() / path.name
    names = {str(place), f"{place} (deleted)"}
    import psutil  # not where only a config is looked at

    for pid in psutil.pids():
        if _holds_lock(Path(f"/proc/{pid}"), names):
            with contextlib.suppress(psutil.NoSuchProcess):
                return psutil.Process(pid)
    return None


def _holds_lock(process: Path, names: set[str]) -> bool:
    try:
        numbers = os.listdir(process / "fd")
    except OSError:  # it is gone, or somebody else's
        return False
    return any(_is_lock(process, number, names) for number in numbers)


def _is_lock(process: Path, number: str, names: set[str]) -> bool:
    try:
        if os.readlink(process / "fd" / number) not in names:
            return False
        info = (process / "fdinfo" / number).read_text()
    except OSError:  # closed since it was listed: a process that has just started does that all the time
        return False
    return any(line.startswith("lock:") and " WRITE " in line for line in info.splitlines())
