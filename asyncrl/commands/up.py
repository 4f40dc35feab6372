"""`asyncrl up`: starts store, learner and generators on this machine, and restarts those that die."""

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.best_effort import BestEffort
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.users import GENERATOR, LEARNER, user_of, with_user
from asyncrl.cluster.plans import store_url
from asyncrl.commands.scale import Scaled
from asyncrl.commands.stopping import announce
from asyncrl.config.addresses import stays_here
from asyncrl.config.base import Root
from asyncrl.config.named_files import is_stage
from asyncrl.config.resolved import dump_config
from asyncrl.config.schema import Config
from asyncrl.config.sections import ControlConfig
from asyncrl.config.store import StoreConfig
from asyncrl.data.data_files import DataFiles
from asyncrl.errors import RunError
from asyncrl.files import replace_text
from asyncrl.hosting.children import Family, ProcessSpec, family
from asyncrl.hosting.environment import LEARNER as LEARNER_VARIABLES
from asyncrl.hosting.environment import RUN_VARIABLE, child_environment
from asyncrl.hosting.gpus import count_gpus
from asyncrl.hosting.machine import share_of_cores
from asyncrl.hosting.placement import Placement, Seat, overfull, placement_of
from asyncrl.hosting.processes import find_holder, module_argv
from asyncrl.hosting.progress import Limits
from asyncrl.hosting.rank_group import FLAG as STANDBY
from asyncrl.hosting.rank_group import MEMORY_SHARE, workers_of
from asyncrl.hosting.route import in_clear, peers_in, reaches, with_addresses
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.launch.own_store import KeptStore, own_store
from asyncrl.launch.scorers import scorer_specs
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory, needing, write_text
from asyncrl.run.keys import SECRET_FILE_VARIABLE, SECRET_VARIABLE, JoinKeys, RunKeys, is_given, run_keys
from asyncrl.run.lock import RunLock, holder_of, is_locked
from asyncrl.run.saved import Saved, refuse_changes
from asyncrl.run.starts import CODE_VARIABLE, code_of, read_starts
from asyncrl.telemetry.logs import setup_logging
from asyncrl.telemetry.status import read_status, write_status

LEASE_S = 180.0  # NFSv4 keeps the locks of a host that has died, by default for 90 s
LEAVE_S = 20.0  # seconds that generators get to leave by themselves after the learner has finished


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run whose processes this process supervises."""

    supervisor: Supervisor
    how_to_join: Sequence[str]  # instructions for generators elsewhere, by line
    _tend: Callable[[], None]
    _announce_stop: Callable[[], float] = lambda: 0.0  # returns the seconds that the learner gets to save
    _tend_store: Callable[[], None] = lambda: None  # to the end: without its store the learner cannot save

    def wait(self, on_tick: Callable[[], None]) -> None:
        """Supervise until the training is over, fails or is to stop. Then save, and stop all."""

        def last_tick() -> None:
            self._tend_store()
            on_tick()

        def tick() -> None:
            self._tend()
            last_tick()

        try:
            self.supervisor.run(tick)
        finally:
            leave_s = LEAVE_S if self.supervisor.is_over else 0.0
            save_s = 0.0 if self.supervisor.is_over else self._announce_stop()
            self.supervisor.stop(leave_s=leave_s, save_s=save_s, on_tick=last_tick)


@contextmanager
def started(
    config: Config,
    saved: Saved | None,
    *,
    fresh: bool,
    generators: bool,
    console: bool,
    join_key: Path | None,
) -> Iterator[StartedRun]:
    """Start a run, or resume it from the checkpoint `saved`. Raises RunError.

    With `console` the supervisor also logs to standard error. `join_key` gets a copy of the generators' key.
    """
    config = with_addresses(config, peers_in(os.environ))
    directory, may_fail, how_to_join = RunDirectory(config.run.directory), BestEffort(), list[str]()
    placement = placement_of(config, count_gpus(), generators=None if generators else 0)
    with ExitStack() as stack:

        def refuse() -> None:
            refuse_changes(config, directory, saved, DataFiles(config))

        given = run_keys(os.environ) if not generators and is_given(os.environ) else None
        keys = stack.enter_context(claimed(directory, config, refuse, may_fail, fresh=fresh, given=given))
        members = stack.enter_context(family())
        setup_logging("supervisor", directory.logs, console=console)
        os.environ[RUN_VARIABLE] = str(directory.path.resolve())  # the store belongs to the run too
        url, tend_store = _store(config, directory, stack)
        is_own = config.store.url is None
        generator_url = with_user(url, GENERATOR) if is_own else url
        learner_url = with_user(url, LEARNER) if is_own else url
        learner = learner_spec(config, directory, learner_url, placement)
        with needing(directory.path):
            replace_text(directory.path / "store.url", generator_url, durable=True)
            if not generators or config.control.bind is not None:
                if join_key is not None:
                    write_text(join_key, keys.join.text(), private=True)
                how_to_join = _how_to_join(config, directory.write_join_key(keys.join), generator_url)
        specs = [learner, *scorer_specs(config, directory, config.served if generators else {})]
        begun = supervised(specs, config.control, directory, members, may_fail)
        supervisor, tend_processes = stack.enter_context(begun)
        scaled = None
        if generators:
            seats = placement.learner_seats
            make = generator_maker(config, directory, generator_url, keys.join, learner=seats)
            scaled = stack.enter_context(Scaled(supervisor, make, directory.scale, directory.scaled))
            scaled.begin(len(placement.generators))

        def tend() -> None:
            if scaled is not None:
                with may_fail("scaling"):
                    scaled.tend()
            tend_processes()

        def announced() -> float:
            return announce(directory, supervisor.doing, config.control.slow_s)

        yield StartedRun(supervisor, how_to_join, tend, announced, tend_store)


@contextmanager
def supervised(
    specs: Sequence[ProcessSpec],
    control: ControlConfig,
    directory: RunDirectory,
    members: Family,
    may_fail: BestEffort,
) -> Iterator[tuple[Supervisor, Callable[[], None]]]:
    """Start processes; yield their supervisor, and a function to call continually while they run."""
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

    limits, most = Limits.of(control), control.max_restarts
    supervisor = Supervisor(specs, max_restarts=most, limits=limits, on_change=record)
    with last_status(directory, may_fail), supervisor:
        yield supervisor, tend


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
            status = read_status(directory.status)
            if status and status.state not in ("finished", state):
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


def _how_to_join(config: Config, join_key: Path, url: str) -> list[str]:
    if user_of(url) == LEARNER:  # of a store with the users of docs/security.md
        url = with_user(url, GENERATOR)
    lines = [f"generators join with: asyncrl generator --store {url}"]
    if config.control.bind is None or (config.store.url is None and config.store.bind is None):
        lines.append(
            "from this host only: set control.bind, and store.bind or store.url, for generators elsewhere"
        )
    else:
        url = url if config.store.url else store_url(config, "")
        lines.append(f"from other hosts: asyncrl generator --store {url}")
        lines.append(f"with a copy of {join_key} there, which {SECRET_FILE_VARIABLE} names")
        lines += filter(None, [in_clear(reaches(config, ""))])
    return lines


def require_password(store: StoreConfig) -> None:
    """Raise RunError for a store on another host if this process has no password for it."""
    if store.url is None or store.insecure or os.environ.get(store.password_env) or stays_here(store.url):
        return
    raise RunError(
        f"store.url is {store.url}, on another host, and {store.password_env} holds no password: anybody who "
        "reaches that store could delete the run's groups; give it the users of docs/security.md and put the "
        f"learner's password into {store.password_env}, or set store.insecure: true in a private network"
    )


def _store(config: Config, directory: RunDirectory, stack: ExitStack) -> tuple[str, Callable[[], None]]:
    """Return the store's URL and a function that restarts the store if it has died."""
    if config.store.url is not None:
        require_password(config.store)
        # Report mistakes before anything starts.
        password = os.environ.get(config.store.password_env)
        connection = StoreConnection(config.store.url, password=password, retry_s=5.0)
        connection.check()
        connection.close()
        return config.store.url, lambda: None
    store = KeptStore(stack.enter_context(own_store(config, directory)))
    return store.server.url, store.tend


def learner_spec(
    config: Config, directory: RunDirectory, store_url: str, placement: Placement
) -> ProcessSpec:
    """Describe the learner's process, or with several ranks the process that starts them."""
    # At max_lag 0 the generators wait while the learner trains, and it waits while they sample.
    busy = config.staleness.max_lag and (len(placement.generators) or config.generator.count or 0)
    threads = config.learner.threads or share_of_cores(config.ranks_per_host + busy)
    module = "learner_process" if config.learner.ranks == 1 else "ranks"
    argv = module_argv(f"asyncrl.launch.{module}")
    argv += ["--config", str(directory.config), "--store", store_url]
    argv += [MEMORY_SHARE, f"{placement.learner_share:g}"]
    gpus = placement.learner_gpus
    env = child_environment(config, directory.path, threads=threads, gpus=gpus, also=LEARNER_VARIABLES)
    return ProcessSpec(
        name="learner",
        argv=argv,
        standby_argv=[*argv, STANDBY],
        env=env | {SECRET_VARIABLE: directory.secret(), CODE_VARIABLE: json.dumps(code_of(config))},
        log_path=directory.logs / "learner.out",
        ends_run=True,
        workers=() if config.learner.ranks == 1 else workers_of(range(config.ranks_per_host)),
    )


def generator_maker(
    config: Config,
    directory: RunDirectory,
    store_url: str,
    keys: JoinKeys,
    *,
    learner: Sequence[Seat],
    prefix: str = "g",
    scorers: Path | None = None,
) -> Callable[[int, int, Collection[str]], ProcessSpec]:
    """Return a function (index, number of generators, names of those that run) -> a generator's process.

    `learner` are the seats of the ranks on this machine; `scorers` is where this command's scorers listen.
    The function raises RunError if a generator's GPUs have no room: running processes keep their shares.
    """
    gpus, seats = count_gpus(), {f"rank {rank} of the learner": seat for rank, seat in enumerate(learner)}
    ranks = tuple(seats)

    def make(index: int, count: int, running: Collection[str]) -> ProcessSpec:
        busy = len(ranks) if config.staleness.max_lag else 0
        threads = config.generator.threads or share_of_cores(count + busy)
        # An index beyond the count: generators that are leaving still have their GPUs.
        wanted = max(count, index + 1)
        placement = placement_of(config, gpus, generators=wanted, has_learner=bool(ranks))
        seat = placement.generators[index]
        name = f"{prefix}{index}"
        # A scorer keeps the share that it was started with.
        scoring = {other: seats.setdefault(other, one) for other, one in placement.scorers.items()}
        others = {other: seats[other] for other in (*ranks, *scoring, *running) if other in seats}
        if found := overfull(seat, others):
            raise RunError(
                f"{name} would need {found}; to divide the GPUs among {count} generators, start the run "
                f"again: `asyncrl down`, then `asyncrl up` with generator.count={count}"
            )
        seats[name] = seat
        argv = module_argv("asyncrl.launch.generator_process", "--id", name)
        argv += ["--config", str(directory.config), "--store", store_url]
        argv += ["--scorers", str(scorers)] if scorers else []
        argv += seat.options
        env = child_environment(config, directory.path, threads=threads, gpus=seat.gpus)
        return ProcessSpec(
            name=name,
            argv=argv,
            env=env | {SECRET_VARIABLE: keys.text()},
            log_path=directory.logs / f"{name}.out",
        )

    return make
