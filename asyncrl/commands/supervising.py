"""What commands that start processes share: the claim on a run directory, and supervision to the end."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from asyncrl.best_effort import BestEffort
from asyncrl.commands.down import announce
from asyncrl.config.base import Root
from asyncrl.config.named_files import is_stage
from asyncrl.config.resolved import dump_config
from asyncrl.config.schema import Config
from asyncrl.config.sections import ControlConfig
from asyncrl.errors import RunError
from asyncrl.files import replace_text
from asyncrl.hosting.children import Family, ProcessSpec, family
from asyncrl.hosting.processes import find_holder
from asyncrl.hosting.progress import Limits
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory, needing
from asyncrl.run.keys import RunKeys
from asyncrl.run.lock import RunLock, holder_of, is_locked
from asyncrl.run.starts import read_starts
from asyncrl.telemetry.status import StatusSnapshot, read_status, write_status

LEASE_S = 180.0  # NFSv4 keeps the locks of a host that has died, by default for 90 s
LEAVE_S = 20.0  # seconds that generators get to leave by themselves after the learner has finished


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run whose processes this process supervises."""

    supervisor: Supervisor
    how_to_join: Sequence[str]  # instructions for generators elsewhere, by line
    tend: Callable[[], None]
    announce_stop: Callable[[], float] = lambda: 0.0  # returns the seconds that the learner gets to save
    tend_store: Callable[[], None] = lambda: None  # to the end: without its store the learner cannot save

    def wait(self, on_tick: Callable[[], None]) -> None:
        """Supervise until the training is over, fails or is to stop. Then save, and stop all."""

        def last_tick() -> None:
            self.tend_store()
            on_tick()

        def tick() -> None:
            self.tend()
            last_tick()

        try:
            self.supervisor.run(tick)
        finally:
            leave_s = LEAVE_S if self.supervisor.is_over else 0.0
            save_s = 0.0 if self.supervisor.is_over else self.announce_stop()
            self.supervisor.stop(leave_s=leave_s, save_s=save_s, on_tick=last_tick)


@contextmanager
def supervised(
    specs: Sequence[ProcessSpec],
    control: ControlConfig,
    directory: RunDirectory,
    members: Family,
    may_fail: BestEffort,
) -> Iterator[StartedRun]:
    """Start the processes of a run or stage, record them, and let the status say how they have ended."""
    is_recorded = True

    def record(pids: Mapping[str, int]) -> None:
        nonlocal is_recorded
        is_recorded = False
        with may_fail("the record of processes"):
            directory.write_processes(pids)
            is_recorded = True

    def tend() -> None:
        members.tend()
        if not is_recorded:
            record(supervisor.pids())

    def announced() -> float:
        return announce(directory, supervisor.doing, control.slow_s)

    limits, most = Limits.of(control), control.max_restarts
    supervisor = Supervisor(specs, max_restarts=most, limits=limits, on_change=record)
    with last_status(directory, may_fail), supervisor:
        yield StartedRun(supervisor, (), tend, announced)


@contextmanager
def supervised_apart(
    specs: Sequence[ProcessSpec], control: ControlConfig, announced: Callable[[], float] = lambda: 0.0
) -> Iterator[StartedRun]:
    """Start processes of a run whose learner, which keeps the run's records, is elsewhere."""
    limits, most = Limits.of(control), control.max_restarts
    with family() as members, Supervisor(specs, max_restarts=most, limits=limits) as supervisor:
        yield StartedRun(supervisor, (), members.tend, announced)


@contextmanager
def last_status(directory: RunDirectory, may_fail: BestEffort) -> Iterator[None]:
    """Let the status say how the run in the body has ended, also if its learner was killed and cannot."""
    state, message = "stopped", "asked to stop"
    try:
        yield
    except Exception as error:
        state, message = "failed", str(error)
        raise
    finally:
        with may_fail("the last status"):
            if (status := read_status(directory.status)) is None:
                # The learner ended before it wrote one: it has trained nothing in this start.
                step, now_s = max(directory.saved_steps(), default=0), time.time()
                status = StatusSnapshot(
                    run=directory.path.name,
                    state="starting",
                    step=step,
                    total_steps=0,
                    version=step,
                    started_at=now_s,
                    updated_at=now_s,
                    pid=0,
                )
            if status.state not in ("finished", state):
                write_status(directory.status, replace(status, state=state, message=message))


def require_not_up(directory: RunDirectory, *, fresh: bool, wait_s: float = 0.0) -> None:
    """Raise RunError if a supervisor is alive in the directory, or if it is no run's and to be `fresh`.

    One that cannot be seen from here may be that of a host that has died; its lock gets `wait_s` to end.
    """
    lock, until_s, is_reported = directory.supervisor_lock, time.monotonic() + wait_s, False
    while time.monotonic() < until_s and is_locked(lock) and find_holder(lock) is None:
        if not is_reported:
            found = f"{directory.path} is held by {holder_of(lock)}, which cannot be seen from here"
            found = f"{found}; waiting for its end, or that of its host: {wait_s:.0f} s at most"
            logging.getLogger(__name__).warning(found)
        is_reported = True
        time.sleep(1.0)
    if directory.was_up and (supervisor := directory.supervisor()) is not None:
        found = f"run {directory.path} is running already (process {supervisor.pid}); watch it with"
        cure = f"`asyncrl status {directory.path} --watch`, stop it with `asyncrl down {directory.path}`"
        raise RunError(f"{found} {cure}, or choose another run.name")
    if fresh:
        directory.require_run()


@contextmanager
def claimed(
    directory: RunDirectory,
    config: Root,
    refuse: Callable[[], None],
    may_fail: BestEffort,
    *,
    fresh: bool,
    given: RunKeys | None = None,
) -> Iterator[RunKeys]:
    """Lock the run directory until the run, or stage, ends, and write its config there.

    `refuse` raises what speaks against going on with an earlier start. After an error, no file has changed.
    The run's secret is that of `given`, or drawn.
    """
    with needing(directory.path):
        is_host = isinstance(config, Config) and config.cluster.kind is not None
        require_not_up(directory, fresh=fresh, wait_s=LEASE_S if is_host else 0.0)
        is_begun = directory.config.exists() and not fresh
        if is_begun and is_stage(directory.config) == isinstance(config, Config):
            found = "a run of `asyncrl up`" if not isinstance(config, Config) else "a stage"
            raise RunError(f"{directory.path} holds {found}; choose another run.name")
        refuse()
        directory.make()
    with RunLock(directory.supervisor_lock):
        with needing(directory.path):
            starts = 0 if fresh else len(read_starts(directory.starts))
            earlier = directory.config.read_text(encoding="utf-8") if starts else ""
            directory.create(fresh=fresh, config=dump_config(config))
            directory.draw_secret(given)
            CheckpointStore(directory.checkpoints, directory.checkpoint_key(), keep=1).require_signature()
            replace_text(directory.config, dump_config(config), durable=True)
        with may_fail("removal of what an earlier start left"):
            directory.forget_stop(by_slurm=isinstance(config, Config) and config.cluster.kind == "slurm")
            directory.forget_earlier()
        try:
            yield directory.keys()
        finally:
            # What was trained so far had other settings than a start that failed before its learner began.
            if earlier and len(read_starts(directory.starts)) == starts:
                with may_fail("restoring the config of the last start"):
                    replace_text(directory.config, earlier, durable=True)
