"""Stops of a run: what its supervisor announces and saves, and how `asyncrl down` ends it without a rest."""

import contextlib
import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from asyncrl.best_effort import BestEffort
from asyncrl.cluster.slurm import end_jobs
from asyncrl.config.named_files import EXPORT
from asyncrl.errors import RunError
from asyncrl.files import read_record, replace_text
from asyncrl.hosting.children import has_ended
from asyncrl.hosting.environment import RUN_VARIABLE
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.jsonl import Tail
from asyncrl.telemetry.status import read_status
from asyncrl.telemetry.text import duration

log = logging.getLogger(__name__)

# Limit for a supervisor that announces no stop, and for what it leaves after the announced time.
PATIENCE_S = 60.0
# Shortest limit in seconds: on a full disk the learner tries for a minute to save.
LEAST_S = 90.0
# A step or a checkpoint may take this many times as long as the last one.
MARGIN = 2.0
# What a learner or stage reports while nothing is trained that is not saved, and between steps.
BEFORE, BETWEEN = ("start", "load the model"), ("wait_groups", "report", "checkpoint", "last checkpoint")
# What a stage reports before its first step, and a stage or learner behind its last one.
AROUND = {
    "evaluate": "ending the evaluation, which changes nothing",
    "last evaluation": "leaving the last evaluation, which the same command makes later",
    "export": "finishing the export of the model",
    "last push to the hub": "leaving the last push to the hub; the model is in its checkpoint",
    "end": "ending the training, of which every step is saved",
}


class Stop(NamedTuple):
    """A stop that has begun."""

    within_s: float  # the learner is killed after this time
    text: str


def announce(directory: RunDirectory, doing: str | None, slow_s: float) -> float:
    """Say what the learner, which was doing `doing`, still does. Return the seconds that it may take.

    The text goes to the log, and for `asyncrl down` into a file. Without a learner (None) nothing is said. A
    step or checkpoint that was not measured lately counts as `slow_s` long.
    """
    if doing is None:
        return 0.0
    may_fail, stop = BestEffort(), Stop(2 * MARGIN * slow_s, "finishing a step, then saving")
    with may_fail("the plan of the stop"):
        stop = _plan(directory, doing, slow_s)
    # A warning, because only warnings show on the dashboard.
    log.warning("%s", stop.text)
    with may_fail("the record of the stop"):
        replace_text(directory.stopping, json.dumps(stop._asdict()))
    return stop.within_s


def _plan(directory: RunDirectory, doing: str, slow_s: float) -> Stop:
    if doing in BEFORE:
        return Stop(0.0, "ending the training, which has begun no step")
    if doing in AROUND:
        return Stop(MARGIN * slow_s, AROUND[doing])
    # Of about 2,000 steps: the learner trains on while this is read.
    end = Tail(directory.metrics / "learner.jsonl", last_bytes=1 << 22)
    last = {name: value for record in end for name, value in record.items()}
    measured = {one: last.get(f"time/{one}") for one in ("step", "checkpoint")}
    within_s = max(LEAST_S, MARGIN * sum(slow_s if one_s is None else one_s for one_s in measured.values()))
    unknown = [one for one, one_s in measured.items() if one_s is None]
    why = f", as no {' and no '.join(unknown)} was measured lately" if unknown else ""
    _, trained, lost = _saved_and_lost(directory)
    what = f"saving step {trained}" if doing in BETWEEN else f"finishing step {trained + 1}, then saving"
    force = f"lose {_steps(lost)}" if lost > 0 else "end immediately"
    return Stop(within_s, f"{what}, within {duration(within_s)}{why} (Ctrl-C again: {force})")


def read_stop(directory: RunDirectory) -> Stop | None:
    """Return the stop that the supervisor has announced; None before it."""
    record = read_record(directory.stopping) or {}
    try:
        return Stop(float(record["within_s"]), str(record["text"]))
    except (KeyError, TypeError, ValueError):
        return None


def what_is_saved(directory: RunDirectory) -> str:
    """Say which steps of a run that has ended are saved and which are lost; empty before the first step."""
    saved, _, lost = _saved_and_lost(directory)
    if saved is None:
        return f"nothing is saved: {_steps(lost)} lost" if lost else ""
    where = directory.saved_steps()[saved]
    text = f"step {saved} is saved in {where}" + (f", {_steps(lost)} after it lost" if lost > 0 else "")
    is_whole = (where / EXPORT).is_dir() or where.parent == directory.trl_checkpoints  # TRL's is a model
    return text + ("" if is_whole else f"; its {EXPORT}/ is missing until the run goes on")


def _steps(count: int) -> str:
    """Return the number with its noun."""
    return f"{count} step" if count == 1 else f"{count} steps"


def _saved_and_lost(directory: RunDirectory) -> tuple[int | None, int, int]:
    """Return the newest step that is saved, the newest that was trained, and how many are not saved."""
    status = read_status(directory.status)
    saved, trained = max(directory.saved_steps(), default=None), status.step if status else 0
    return saved, trained, trained - (saved or 0)


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
