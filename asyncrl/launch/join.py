"""Generators that join a run from this or another host: `asyncrl generator --count 8`."""

import json
import os
import socket
from pathlib import Path
from urllib.parse import unquote, urlsplit

from asyncrl import __version__
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.run_record import RunRecord, StoredRun
from asyncrl.buffer.users import user_of
from asyncrl.config.load import load_config
from asyncrl.config.resolved import config_hash, dump_config
from asyncrl.config.schema import Config, StoreConfig, holds_password
from asyncrl.errors import RunError
from asyncrl.launch.directory import RunDirectory, find_run
from asyncrl.launch.keys import JoinKeys, join_keys
from asyncrl.launch.up import generator_specs, stop_on_signals
from asyncrl.launch.wiring import STORE_VARIABLE
from asyncrl.supervisor import Supervisor
from asyncrl.telemetry.logs import setup_logging


def run_generators(*, count: int, config_path: Path | None, store_url: str | None) -> int:
    """Start `count` generators, keep them alive, and leave when the run is over; the exit status. Raises RunError."""
    url = store_url or os.environ.get(STORE_VARIABLE) or _newest_store()
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise RunError(f"--store is {url}; allowed is redis://, rediss:// or unix://, such as redis://{url.split('://')[-1]}/0")
    own = load_config(config_path) if config_path else None
    variable = (own.store if own else StoreConfig()).password_env
    if holds_password(url):
        raise RunError(f"the store's URL holds a password, which process lists would show; put it into {variable} instead")
    learners = _run_here(url, own)
    keys = learners.keys().join if learners else join_keys()
    password = os.environ.get(variable) or keys.store_password(user_of(url))
    record = RunRecord(StoreConnection(url, password=password)).read()
    config = own or Config.model_validate(json.loads(record.config_json))
    directory = learners or RunDirectory(config.run.directory)
    if learners is None:
        directory.create(fresh=False)
        directory.config.write_text(dump_config(config))
    _check_membership(record, config, keys)
    setup_logging("generators", directory.logs, console=True)
    here = config.model_copy(update={"generator": config.generator.model_copy(update={"count": count})})
    prefix = f"{socket.gethostname()}.{os.getpid()}."
    specs = generator_specs(here, directory, url, keys, learner_ranks=0, prefix=prefix)
    with Supervisor(specs, max_restarts=config.control.max_restarts) as supervisor, stop_on_signals(supervisor) as stopped:
        supervisor.run()
    return stopped.status


def _newest_store() -> str:
    directory = find_run(None)
    url = directory.store_url()
    if url is None:
        raise RunError(f"run {directory.path} has no store that is running; start it with `asyncrl up`, or give --store URL")
    return url


def _run_here(url: str, config: Config | None) -> RunDirectory | None:
    """The learner's run directory, when this is its machine: there the secret is, and nothing else is needed."""
    candidates = [path.parent for path in Path("runs").glob("*/store.url")]
    if config is not None:
        candidates.append(config.run.directory)
    if url.startswith("unix:"):  # RUN/store/store.sock
        candidates.append(Path(unquote(urlsplit(url).path)).parent.parent)
    return next((found for found in map(RunDirectory, candidates) if found.store_url() == url), None)


def _check_membership(record: StoredRun, config: Config, keys: JoinKeys) -> None:
    """What the learner would refuse, said before a model is loaded."""
    if record.release != __version__:
        raise RunError(f"run {record.name} is of asyncrl {record.release}, this is {__version__}; install the same release")
    if record.config_hash != config_hash(config):
        raise RunError(
            f"run {record.name} has another config (hash {record.config_hash}, yours {config_hash(config)}); "
            "leave out --config to use the run's own"
        )
    if record.key_id != keys.key_id:
        raise RunError(f"run {record.name} has another secret; use the join.key of the learner's run directory")
