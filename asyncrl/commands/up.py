"""A run on this machine: the store, the learner, the generators, and somebody who looks after them."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from asyncrl.best_effort import BestEffort
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.users import GENERATOR, LEARNER, with_user
from asyncrl.commands.scale import Scaled
from asyncrl.commands.view import show_result, viewer, wants_lines
from asyncrl.config.addresses import is_loopback
from asyncrl.config.resolved import dump_config
from asyncrl.config.schema import Config, StoreConfig
from asyncrl.data.dataset import DataFiles
from asyncrl.errors import RunError
from asyncrl.files import replace_text
from asyncrl.launch.environment import LEARNER as LEARNER_VARIABLES
from asyncrl.launch.environment import RUN_VARIABLE, child_environment
from asyncrl.launch.family import family
from asyncrl.launch.gpus import count_gpus, generator_gpus, learner_gpus
from asyncrl.launch.own_store import KeptStore, own_store
from asyncrl.launch.ranks import workers_of
from asyncrl.launch.standby import FLAG as STANDBY
from asyncrl.progress import Limits
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory, needing, write_text
from asyncrl.run.keys import SECRET_FILE_VARIABLE, SECRET_VARIABLE, JoinKeys, RunKeys
from asyncrl.run.lock import RunLock
from asyncrl.run.saved import Saved, nothing_left, read_saved, refuse_changes
from asyncrl.supervisor import ProcessSpec, Supervisor
from asyncrl.telemetry.logs import setup_logging

LEAVE_S = 20.0  # after the learner has finished, generators get this long to leave by themselves


def run_here(config: Config, *, fresh: bool, generators: bool, plain: bool, join_key: Path | None = None) -> int:
    """Run until the training is done or somebody stops it; the exit status says which. Raises RunError.

    `join_key` is a second place for the key of generators elsewhere.
    """
    directory = RunDirectory(config.run.directory)
    may_fail, lines = BestEffort(), wants_lines(plain=plain)
    saved = None if fresh else read_saved(directory)
    if not fresh and (reason := nothing_left(config, directory, saved)):
        print(reason, flush=True)  # noqa: T201 - the command's output
        return 0
    with ExitStack() as stack:
        keys = stack.enter_context(_claimed(config, directory, may_fail, saved, fresh=fresh))
        members = stack.enter_context(family())
        setup_logging("supervisor", directory.logs, console=lines)
        os.environ[RUN_VARIABLE] = str(directory.path.resolve())  # the store carries the run's mark too
        url, tend_store = _store(config, directory, stack)
        learner_url, generator_url = (url, url) if config.store.url else (with_user(url, LEARNER), with_user(url, GENERATOR))
        specs = [learner_spec(config, directory, learner_url)]
        with needing(directory.path):
            directory.write_store_url(generator_url)
            if not generators or config.control.bind is not None:
                if join_key is not None:
                    write_text(join_key, keys.join.text(), private=True)
                _tell_how_to_join(config, directory.write_join_key(keys.join), generator_url)
        is_recorded = True

        def record(pids: Mapping[str, int]) -> None:
            nonlocal is_recorded
            with may_fail("the record of processes") as attempt:
                directory.write_processes(pids)
            is_recorded = attempt.succeeded

        limits, max_restarts = limits_of(config), config.control.max_restarts
        supervisor = stack.enter_context(Supervisor(specs, max_restarts=max_restarts, limits=limits, on_change=record))
        make = generator_maker(config, directory, generator_url, keys.join)
        scaled = stack.enter_context(Scaled(supervisor, make, directory.scale))
        scaled.begin(config.generator.count if generators else 0)
        view = stack.enter_context(viewer(directory, lines=lines))

        def on_tick() -> None:
            tend_store()
            for what, tend in (("scaling", scaled.tend), ("the view", view), ("the reaper", members.tend)):
                with may_fail(what):
                    tend()
            if not is_recorded:
                record(supervisor.pids())

        with stop_on_signals(supervisor) as stopped:
            supervisor.run(on_tick)
            supervisor.stop(grace_s=LEAVE_S if supervisor.is_over else 0.0)
    with may_fail("the result"):
        show_result(directory, finished=supervisor.is_over)
    return 0 if supervisor.is_over else stopped.status


@contextmanager
def _claimed(
    config: Config, directory: RunDirectory, may_fail: BestEffort, saved: Saved | None, *, fresh: bool
) -> Iterator[RunKeys]:
    """The run directory, this process's alone until the run ends. Raises RunError; then nothing in it has changed."""
    with needing(directory.path):
        refuse_second_run(directory)
        if fresh:
            directory.require_run()
        refuse_changes(config, directory, saved, DataFiles(config.data))
        directory.make()
    with RunLock(directory.supervisor_lock):
        with needing(directory.path):
            directory.create(fresh=fresh)
            directory.draw_secret()
            CheckpointStore(directory.checkpoints, directory.checkpoint_key(), keep=1).require_signature()
            replace_text(directory.config, dump_config(config), durable=True)
        with may_fail("removal of old Prometheus targets"):
            directory.forget_targets()
        yield directory.keys()


def limits_of(config: Config) -> Limits:
    """When a process counts as hung."""
    return Limits(hang_s=config.control.hang_s, slow_s=config.control.slow_s)


def _tell_how_to_join(config: Config, join_key: Path, url: str) -> None:
    lines = [f"generators join with: asyncrl generator --store {url}"]
    if config.control.bind is None or (config.store.url is None and config.store.bind is None):
        lines.append("from this host only: set control.bind, and store.bind or store.url, for generators elsewhere")
    else:
        if config.store.bind is not None:
            url = with_user(config.store.bind.replace("tcp://", "redis://"), GENERATOR)
        lines.append(f"from other hosts: asyncrl generator --store {url}")
        lines.append(f"with a copy of {join_key} there, which {SECRET_FILE_VARIABLE} names")
    print("\n".join(lines), flush=True)  # noqa: T201 - the command's output


def refuse_second_run(directory: RunDirectory) -> None:
    """Two supervisors on one run directory would start everything twice."""
    if directory.was_up and (supervisor := directory.supervisor()) is not None:
        raise RunError(
            f"run {directory.path} is running already (process {supervisor.pid}); watch it with `asyncrl status --watch`, "
            f"stop it with `asyncrl down {directory.path}`, or choose another run.name"
        )


def require_password(store: StoreConfig) -> None:
    """Raises RunError for a store on another host that this process has no password for."""
    if store.url is None or store.insecure or os.environ.get(store.password_env):
        return
    where = urlsplit(store.url)
    if where.scheme == "unix" or is_loopback(where.hostname or ""):
        return
    raise RunError(
        f"store.url is {store.url}, on another host, and {store.password_env} holds no password: whoever reaches that store "
        "could throw the run's groups away; give it the users of docs/security.md and put the learner's password into "
        f"{store.password_env}, or accept it with store.insecure: true in a network that nobody else reaches"
    )


def _store(config: Config, directory: RunDirectory, stack: ExitStack) -> tuple[str, Callable[[], None]]:
    """(url, what to do every tick so that it stays up)."""
    if config.store.url is not None:
        require_password(config.store)
        # A mistake is told before anything starts.
        password = os.environ.get(config.store.password_env)
        connection = StoreConnection(config.store.url, password=password, retry_s=5.0)
        connection.check()
        connection.close()
        return config.store.url, lambda: None
    store = KeptStore(stack.enter_context(own_store(config, directory)))
    return store.server.url, store.tend


def share_of_cores(busy: int) -> int:
    """Threads per process when `busy` of them share this machine."""
    return max(1, len(os.sched_getaffinity(0)) // busy)


def learner_spec(config: Config, directory: RunDirectory, store_url: str) -> ProcessSpec:
    """The learner, or who starts its ranks when there are several."""
    threads = config.learner.threads or share_of_cores(config.learner.ranks + config.generator.count)
    gpus = learner_gpus(count_gpus(), config.learner.ranks)
    module = "learner_process" if config.learner.ranks == 1 else "ranks"
    argv = [sys.executable, "-m", f"asyncrl.launch.{module}", "--config", str(directory.config), "--store", store_url]
    return ProcessSpec(
        name="learner",
        argv=argv,
        standby_argv=[*argv, STANDBY],
        env=child_environment(config, directory.path, threads=threads, gpus=gpus, also=LEARNER_VARIABLES)
        | {SECRET_VARIABLE: directory.secret()},
        log_path=directory.logs / "learner.out",
        ends_run=True,
        grace_s=30.0,  # it ends its step and saves
        workers=() if config.learner.ranks == 1 else workers_of(config.learner.ranks),
    )


def generator_specs(
    config: Config, directory: RunDirectory, store_url: str, keys: JoinKeys, *, learner_ranks: int, prefix: str = "g"
) -> list[ProcessSpec]:
    """`generator.count` generators beside `learner_ranks` ranks on this machine: cores and GPUs are shared out."""
    make = generator_maker(config, directory, store_url, keys, learner_ranks=learner_ranks, prefix=prefix)
    return [make(index, config.generator.count) for index in range(config.generator.count)]


def generator_maker(
    config: Config,
    directory: RunDirectory,
    store_url: str,
    keys: JoinKeys,
    *,
    learner_ranks: int | None = None,
    prefix: str = "g",
) -> Callable[[int, int], ProcessSpec]:
    """(index, how many there are) -> one generator of this machine, which it shares with the learner's ranks (default: all)."""
    ranks = config.learner.ranks if learner_ranks is None else learner_ranks
    width, gpus = config.generator.tensor_parallel, count_gpus()

    def make(index: int, count: int) -> ProcessSpec:
        threads = config.generator.threads or share_of_cores(count + ranks)
        visible = generator_gpus(gpus, index, ranks=ranks, width=width)
        return generator_spec(config, directory, store_url, keys, f"{prefix}{index}", threads=threads, gpus=visible)

    return make


def generator_spec(
    config: Config,
    directory: RunDirectory,
    store_url: str,
    keys: JoinKeys,
    generator_id: str,
    *,
    threads: int,
    gpus: Sequence[int],
) -> ProcessSpec:
    """One generator."""
    return ProcessSpec(
        name=generator_id,
        argv=[
            *[sys.executable, "-m", "asyncrl.launch.generator_process", "--id", generator_id],
            *["--config", str(directory.config), "--store", store_url],
        ],
        env=child_environment(config, directory.path, threads=threads, gpus=gpus) | {SECRET_VARIABLE: keys.text()},
        log_path=directory.logs / f"{generator_id}.out",
    )


@dataclass(slots=True)
class Stopped:
    """How a supervisor was told to stop."""

    status: int = 0  # exit status of a command that a signal ended: 128 and its number, as shells have it


@contextmanager
def stop_on_signals(supervisor: Supervisor) -> Iterator[Stopped]:
    """Ctrl-C, SIGTERM and, except under `nohup`, a closed terminal end the run in good order; a second one changes nothing."""
    stopped = Stopped()

    def stop(signum: int, frame: FrameType | None) -> None:
        stopped.status = stopped.status or 128 + signum
        supervisor.request_stop(signal.Signals(signum).name)

    heeded = [signal.SIGINT, signal.SIGTERM]
    heeded += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    previous = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
