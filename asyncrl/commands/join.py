"""Generators that join a run from this or another host: `asyncrl generator --count 8`."""

import contextlib
import hmac
import os
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from asyncrl import __version__
from asyncrl.best_effort import BestEffort
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.run_record import RunRecord, StoredRun
from asyncrl.buffer.users import GENERATOR, user_of, with_user
from asyncrl.commands.allowance import check_allowed
from asyncrl.commands.up import generator_specs, limits_of, stop_on_signals
from asyncrl.config.addresses import open_ways
from asyncrl.config.load import load_config
from asyncrl.config.resolved import config_hash, dump_config
from asyncrl.config.schema import Config, StoreConfig
from asyncrl.config.store import holds_password
from asyncrl.errors import ForeignRunError, RunError, RunNotUp, StoreError, StoreRefused
from asyncrl.files import replace_text
from asyncrl.launch.family import family
from asyncrl.run.directory import RunDirectory, find_run
from asyncrl.run.keys import JoinKeys, forget_secrets, is_given, join_keys
from asyncrl.supervisor import Supervisor
from asyncrl.telemetry.logs import setup_logging

STORE_VARIABLE = "ASYNCRL_STORE_URL"
_ASK_EVERY_S = 1.0
_STORE_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Found:
    """A run that can be joined."""

    url: str
    keys: JoinKeys
    record: StoredRun
    learners: RunDirectory | None  # the learner's run directory, where this machine sees it


def run_generators(
    *, count: int, config_path: Path | None, store_url: str | None, allowed: Collection[str] = (), wait_s: float = 0.0
) -> int:
    """Start `count` generators, keep them alive, and leave when the run is over; the exit status. Raises RunError.

    A run that is not there yet is waited for, `wait_s` seconds at most. `allowed`: see `launch.allowance`.
    """
    own = load_config(config_path) if config_path else None
    own_keys = is_given(os.environ)
    found = _wait_for_run(lambda: _find(store_url, own, own_keys=own_keys), wait_s)
    config = own or _config_of(found, allowed)
    directory = found.learners or RunDirectory(config.run.directory)
    if found.learners is None:
        directory.create(fresh=False)
        replace_text(directory.config, dump_config(config))  # generators that another command started here may be reading it
    _check_membership(found.record, config)
    setup_logging("generators", directory.logs, console=True)
    forget_secrets(os.environ)
    here = config.model_copy(update={"generator": config.generator.model_copy(update={"count": count})})
    prefix = f"{socket.gethostname()}.{os.getpid()}."
    specs = generator_specs(here, directory, found.url, found.keys, learner_ranks=0, prefix=prefix)
    if own is None:
        specs = [replace(spec, argv=[*spec.argv, "--from-record"]) for spec in specs]
    supervisor = Supervisor(specs, max_restarts=config.control.max_restarts, limits=limits_of(config))
    may_fail = BestEffort()
    with family() as members, supervisor, stop_on_signals(supervisor) as stopped:

        def on_tick() -> None:
            with may_fail("the reaper"):
                members.tend()

        supervisor.run(on_tick)
    return stopped.status


def _wait_for_run(find: Callable[[], _Found], wait_s: float) -> _Found:
    """Ask until the run is there. What asking again cannot mend is raised at once."""
    until_s, told = time.monotonic() + wait_s, ""
    while True:
        try:
            return find()
        except (StoreRefused, ForeignRunError):
            raise
        except (StoreError, RunNotUp) as error:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise
            if str(error) != told:
                told = str(error)
                print(f"waiting for the run, {left_s:.0f} s more at most: {told}", flush=True)  # noqa: T201 - the command's output
            time.sleep(min(_ASK_EVERY_S, left_s))


def _find(store_url: str | None, own: Config | None, *, own_keys: bool) -> _Found:
    url = store_url or os.environ.get(STORE_VARIABLE) or _newest_store()
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise RunError(f"--store is {url}; allowed is redis://, rediss:// or unix://, such as redis://{url.split('://')[-1]}/0")
    if not (own and own.store.insecure) and url.startswith("rediss://") and (ways := list(open_ways(url))):
        raise RunError(f"--store is {url}: {'; '.join(ways)}")
    variable = (own.store if own else StoreConfig()).password_env
    if holds_password(url):
        raise RunError(f"the store's URL holds a password, which process lists would show; put it into {variable} instead")
    learners = _run_here(url, own)
    keys = join_keys(os.environ) if learners is None or own_keys else learners.keys().join
    learners = learners or _run_of(keys)
    password = os.environ.get(variable) or keys.store_password(user_of(url))
    with contextlib.closing(StoreConnection(url, password=password, retry_s=_STORE_RETRY_S)) as connection:
        return _Found(url, keys, RunRecord(connection, keys.record).read(), learners)


def _config_of(found: _Found, allowed: Collection[str]) -> Config:
    """That of the run directory where it is this machine's; else the record's, whose code this host has to allow."""
    if found.learners is not None:
        return load_config(found.learners.config)
    config = Config.model_validate_json(found.record.config_json)
    check_allowed(config, allowed)
    return config


def _newest_store() -> str:
    directory = find_run(None)
    url = directory.store_url()
    if url is None:
        raise RunNotUp(f"run {directory.path} has no store that is running; start it with `asyncrl up`, or give --store URL")
    return url


def _run_here(url: str, config: Config | None) -> RunDirectory | None:
    """The learner's run directory, when this is its machine: there the secret is, and nothing else is needed."""
    candidates = [path.parent for path in Path("runs").glob("*/store.url")]
    if config is not None:
        candidates.append(config.run.directory)
    if url.startswith("unix:"):  # RUN/store/store.sock
        candidates.append(Path(unquote(urlsplit(url).path)).parent.parent)
    place = with_user(url, GENERATOR)  # the learner may have another user there
    urls = ((found, found.store_url()) for found in map(RunDirectory, candidates))
    return next((found for found, known in urls if known and with_user(known, GENERATOR) == place), None)


def _run_of(keys: JoinKeys) -> RunDirectory | None:
    """The learner's run directory, where another host sees it too."""
    text = keys.text()
    for config in Path("runs").glob("*/config.yaml"):
        with contextlib.suppress(OSError):
            if hmac.compare_digest((config.parent / "join.key").read_bytes(), text.encode()):
                return RunDirectory(config.parent)
    return None


def _check_membership(record: StoredRun, config: Config) -> None:
    """What the learner would refuse, said before a model is loaded."""
    if record.release != __version__:
        raise RunError(f"run {record.name} is of asyncrl {record.release}, this is {__version__}; install the same release")
    if record.config_hash != config_hash(config):
        raise RunError(
            f"run {record.name} has another config (hash {record.config_hash}, yours {config_hash(config)}); "
            "leave out --config to use the run's own"
        )
