"""`asyncrl down`: stops a run and checks that none of its processes is left."""

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from asyncrl.cluster.slurm import end_jobs
from asyncrl.commands.stopping import Stop, read_stop
from asyncrl.errors import RunError
from asyncrl.hosting.children import has_ended
from asyncrl.hosting.environment import RUN_VARIABLE
from asyncrl.run.directory import RunDirectory

# Limit for a supervisor that announces no stop, and for what it leaves after the announced time.
PATIENCE_S = 60.0


def end_run(directory: RunDirectory, report: Callable[[str], object] = lambda text: None) -> int | None:
    """Ask the supervisor to stop, wait, and kill what is left. Raises RunError if a process survives.

    Return the number of processes that had to be killed; None if the run was not up. `report` gets what the
    supervisor announces. A Ctrl-C is passed on to it.
    """
    was_up = directory.job.exists() and end_jobs(directory.path, _Patience(directory, report).is_over, report)
    if was_up and not directory.was_up:
        return 0  # its jobs had not begun, or ran on other machines
    supervisor = _leader(directory)
    while True:
        members = processes_of(directory.path)
        if supervisor is not None:
            descendants: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                # All processes of the run stay below its supervisor while it lives: see `hosting.children`.
                descendants = list(supervisor.children(recursive=True))
                supervisor.send_signal(signal.SIGTERM)
            members = [*descendants, supervisor, *members]
        was_up = was_up or bool(members)
        try:
            alive = _wait(members, _Patience(directory, report).is_over)
        except KeyboardInterrupt:
            if supervisor is None:
                raise
            with contextlib.suppress(psutil.NoSuchProcess):
                supervisor.send_signal(signal.SIGINT)
            alive = _wait(members, _after(PATIENCE_S))
        if (supervisor := _leader(directory)) is None or supervisor in alive:
            break  # otherwise the supervisor started after we looked, and its processes are not leftovers
    alive += [process for process in processes_of(directory.path) if process not in alive]
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    if left := {*_wait(alive, _after(10.0)), *processes_of(directory.path)}:
        pids = [process.pid for process in left]
        raise RunError(f"{directory.path}: processes {pids} cannot be ended; look at them with ps")
    return len(alive) if was_up or alive else None


def _leader(directory: RunDirectory) -> psutil.Process | None:
    """Return the process that ends all others of the run: of many hosts that which starts them."""
    return directory.holder(directory.driver_lock) or directory.supervisor()


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return all processes whose environment names the run directory."""
    mark = str(directory.resolve())
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == mark and not has_ended(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # the process has ended, or belongs to another user
    return found


@dataclass(slots=True)
class _Patience:
    """The time that a supervisor gets: what it announces, and `PATIENCE_S` more."""

    directory: RunDirectory
    report: Callable[[str], object]
    begun_s: float = field(default_factory=time.monotonic)
    announced: Stop | None = None

    def is_over(self) -> bool:
        if self.announced is None and (found := read_stop(self.directory)):
            self.announced = found
            self.report(found.text)
        within_s = self.announced.within_s if self.announced else 0.0
        return time.monotonic() > self.begun_s + within_s + PATIENCE_S


def _after(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() > until_s


def _wait(processes: Sequence[psutil.Process], is_over: Callable[[], bool]) -> list[psutil.Process]:
    """Return the processes that are still alive when `is_over()`."""
    while (alive := [process for process in processes if not has_ended(process)]) and not is_over():
        time.sleep(0.1)
    return alive
