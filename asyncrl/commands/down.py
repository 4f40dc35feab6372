"""`asyncrl down`: stop a run and prove that nothing of it is left."""

import contextlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from asyncrl.errors import RunError
from asyncrl.launch.environment import RUN_VARIABLE
from asyncrl.run.directory import RunDirectory, find_run

PATIENCE_S = 60.0


def stop_run(run: Path | None) -> None:
    """Stop a run and say so. Raises RunError when something survives."""
    directory = find_run(run)
    was_up, killed = end_run(directory)
    what = "stopped" if was_up else "was not up"
    by_force = f" ({killed} had to be killed)" if killed else ""
    print(f"{directory.path}: {what}, no process is left{by_force}")  # noqa: T201 - the command's output


def end_run(directory: RunDirectory) -> tuple[bool, int]:
    """Ask the supervisor to stop, wait, and kill what is left.

    Returns whether the run was up, and how many processes had to be killed. Raises RunError when something survives.
    """
    was_up, supervisor = False, directory.supervisor()
    while True:
        members = processes_of(directory.path)
        if supervisor is not None:
            members = [*_descendants(supervisor), supervisor, *members]
            with contextlib.suppress(psutil.NoSuchProcess):
                supervisor.send_signal(signal.SIGTERM)
        was_up = was_up or bool(members)
        alive = _wait(members, PATIENCE_S)
        if (supervisor := directory.supervisor()) is None or supervisor in alive:
            break  # else it was being started when we looked, and its processes are not leftovers
    alive += [process for process in processes_of(directory.path) if process not in alive]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if left := {*_wait(alive, 10.0), *processes_of(directory.path)}:
        raise RunError(f"{directory.path}: processes {[process.pid for process in left]} cannot be ended; look at them with ps")
    return was_up or bool(alive), len(alive)


def _descendants(supervisor: psutil.Process) -> list[psutil.Process]:
    """Nobody can leave them while it lives: see `launch.family`."""
    try:
        return list(supervisor.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def processes_of(directory: Path) -> list[psutil.Process]:
    """Every process that carries the run's mark in its environment."""
    mark = str(directory.resolve())
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == mark and _is_alive(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone, or somebody else's
    return found


def _wait(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that live on after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _is_alive(process)]) and time.monotonic() < until_s:
        time.sleep(0.1)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    """False too for one that has ended and whose parent has not asked for its status: `psutil.wait_procs` would wait for that."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
