"""`asyncrl down`: stops a run and checks that none of its processes is left."""

import contextlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from asyncrl.errors import RunError
from asyncrl.hosting.environment import RUN_VARIABLE
from asyncrl.run.directory import RunDirectory

PATIENCE_S = 60.0


class Ended(NamedTuple):
    """How a run was ended."""

    was_up: bool
    killed: int  # number of processes that had to be killed


def end_run(directory: RunDirectory) -> Ended:
    """Ask the supervisor to stop, wait, and kill what is left. Raises RunError if a process survives."""
    was_up, supervisor = False, directory.supervisor()
    while True:
        members = processes_of(directory.path)
        if supervisor is not None:
            descendants: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                # All processes of the run stay below its supervisor while it lives: see `hosting.family`.
                descendants = list(supervisor.children(recursive=True))
                supervisor.send_signal(signal.SIGTERM)
            members = [*descendants, supervisor, *members]
        was_up = was_up or bool(members)
        alive = _wait(members, PATIENCE_S)
        if (supervisor := directory.supervisor()) is None or supervisor in alive:
            break  # otherwise the supervisor started after we looked, and its processes are not leftovers
    alive += [process for process in processes_of(directory.path) if process not in alive]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if left := {*_wait(alive, 10.0), *processes_of(directory.path)}:
        pids = [process.pid for process in left]
        raise RunError(f"{directory.path}: processes {pids} cannot be ended; look at them with ps")
    return Ended(was_up or bool(alive), len(alive))


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return all processes whose environment names the run directory."""
    mark = str(directory.resolve())
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == mark and _is_alive(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # the process has ended, or belongs to another user
    return found


def _wait(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return the processes that are still alive after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _is_alive(process)]) and time.monotonic() < until_s:
        time.sleep(0.1)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie does not, though `psutil.wait_procs` would wait for its parent."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
