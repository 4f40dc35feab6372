"""Child processes on Linux: nothing outlives its parent, nothing is waited for without a bound."""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_REAP_S = 10.0
# For processes that a library starts with `python -m`: see `module_argv`.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
# Process, user and group of a peer, `struct ucred` of the kernel.
_CREDENTIALS = struct.Struct("3i")
# Instead of a preexec_fn, which is not safe in a process with threads.
# A Ctrl-C in a terminal reaches this program, too; Python's own handler would print a traceback.
_BOUND_TO_PARENT = """
import os, signal, sys
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
from asyncrl.hosting.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error}")
"""


def die_with_parent(parent_pid: int | None = None, how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process, or send another signal, when its parent dies.

    The kernel ignores a death before this call. So this process exits if its parent is not `parent_pid`.
    """
    if sys.platform != "linux":
        return
    _prctl("PR_SET_PDEATHSIG", 1, how)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def restrict(limits: Mapping[str, int]) -> None:
    """Set soft and hard limits of this process, by the names of RLIMIT_, unless they are lower already."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lowest, lowest))


def join_outputs() -> None:
    """Let what this process prints join standard error. Output before an error belongs to its message."""
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def module_argv(module: str, *words: str) -> list[str]:
    """Return the command that runs one of our modules.

    Without `-P` a file of the working directory would stand in for a library's module of the same name.
    """
    return [sys.executable, "-P", "-m", module, *words]


def bound_to_us(command: Sequence[str]) -> list[str]:
    """Return the command that starts `command` so that the kernel kills it when our process dies.

    The first word of `command` is a path. Linux kills it with the *thread* that started it, so that thread
    must live as long.
    """
    return [sys.executable, "-P", "-c", _BOUND_TO_PARENT, str(os.getpid()), *command]


def kill_group(pid: int) -> None:
    """Kill all processes of a group, which may have ended, or belong to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_marked(mark: str) -> None:
    """Kill all processes that inherited the variable `mark`, a text NAME=VALUE, wherever they have moved.

    If such a process leads a process group, the whole group is killed. It takes `_REAP_S` at most; then the
    kernel holds what is left.
    """
    until_s = time.monotonic() + _REAP_S
    while (found := list(_marked(mark.encode()))) and time.monotonic() < until_s:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                kill = os.killpg if os.getpgid(pid) == pid else os.kill
                kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: bytes) -> Iterator[int]:
    """The processes that have a variable of the environment, without those that have ended."""
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in place.read_bytes().split(b"\0"):
                yield int(place.parent.name)


def die_with_spawner() -> None:
    """Call `die_with_parent` in a process that `multiprocessing` has spawned; do nothing elsewhere."""
    if (parent := multiprocessing.parent_process()) is not None:
        die_with_parent(parent.pid)


def close_to_others() -> None:
    """Refuse our memory and descriptors to processes of our user (ptrace, /proc/PID/mem, /proc/PID/fd)."""
    _prctl("PR_SET_DUMPABLE", 4, 0)


def closed_to_us(listener: Path) -> str:
    """Why this process cannot open the descriptors of the one that listens at a socket file; "" if it can.

    Raises OSError if no process listens.
    """
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(listener))
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid = _CREDENTIALS.unpack(credentials)[0]
    if pid == 0:  # the kernel has no number for it here
        return "it is in another container"
    try:
        os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return "it is of another user"
    return ""


def adopt_orphans(wanted: bool) -> None:
    """Have the kernel make this process the parent of descendants whose parents die, or stop doing so."""
    _prctl("PR_SET_CHILD_SUBREAPER", 36, int(wanted))


def _prctl(name: str, option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({name}) failed")


def is_secret(name: str) -> bool:
    """Whether an environment variable of this name holds a secret."""
    return name.upper().endswith(("TOKEN", "KEY", "PASSWORD", "SECRET", "CREDENTIALS"))


def public_environment(also: Sequence[str] = ()) -> dict[str, str]:
    """Return our environment without secrets, except those whose names match a pattern in `also`.

    Programs of a user find the modules next to them, unlike ours, see `SAFE_PATH`.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in SAFE_PATH
        and (not is_secret(name) or any(fnmatchcase(name, pattern) for pattern in also))
    }


def stop_processes(processes: Sequence["subprocess.Popen[bytes]"], *, grace_s: float) -> list[int]:
    """Terminate all, wait `grace_s` in total, then kill. Returns the ids of those that the kernel holds."""
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
    """Return the process of this host, container and user that holds the lock on the file at `path`.

    /proc knows: neither the file's content, nor its deletion, nor a clock matters.
    """
    import psutil  # importing it takes time, and most commands need no lock

    place = path.parent.resolve() / path.name
    names = {str(place), f"{place} (deleted)"}
    for pid in psutil.pids():
        if _holds_lock(Path(f"/proc/{pid}"), names):
            with contextlib.suppress(psutil.NoSuchProcess):
                return psutil.Process(pid)
    return None


def _holds_lock(process: Path, names: set[str]) -> bool:
    try:
        numbers = os.listdir(process / "fd")
    except OSError:  # it has ended, or belongs to another user
        return False
    return any(_is_lock(process, number, names) for number in numbers)


def _is_lock(process: Path, number: str, names: set[str]) -> bool:
    try:
        if os.readlink(process / "fd" / number) not in names:
            return False
        info = (process / "fdinfo" / number).read_text()
    except OSError:  # closed since it was listed: a process that starts closes many
        return False
    return any(line.startswith("lock:") and " WRITE " in line for line in info.splitlines())
