"""Generators that join a run from this or another host: `asyncrl generator --count 8`."""

import json
import os
import socket
from pathlib import Path

from asyncrl import __version__
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.run_record import RunRecord, StoredRun
from asyncrl.config.load import load_config
from asyncrl.config.resolved import config_hash, dump_config
from asyncrl.config.schema import Config, StoreConfig
from asyncrl.errors import RunError
from asyncrl.launch.directory import RunDirectory, find_run
from asyncrl.launch.up import generator_specs, stop_on_signals
from asyncrl.launch.wiring import STORE_VARIABLE, WIRE_KEY_VARIABLE, key_id, wire_key
from asyncrl.supervisor import Supervisor
from asyncrl.telemetry.logs import setup_logging


def run_generators(*, count: int, config_path: Path | None, store_url: str | None) -> None:
    """Start `count` generators, keep them alive, and leave when the run is over. Raises RunError."""
    url = store_url or os.environ.get(STORE_VARIABLE) or _newest_store()
    record = RunRecord(StoreConnection(url, password=os.environ.get(StoreConfig().password_env))).read()
    config = load_config(config_path) if config_path else Config.model_validate(json.loads(record.config_json))
    directory = RunDirectory(config.run.directory)
    if directory.store_url() == url:  # the learner's own machine
        os.environ.setdefault(WIRE_KEY_VARIABLE, directory.secret())
    else:
        directory.create(fresh=False)
        directory.config.write_text(dump_config(config))
    _check_membership(record, config)
    setup_logging("generators", directory.logs, console=True)
    here = config.model_copy(update={"generator": config.generator.model_copy(update={"count": count})})
    prefix = f"{socket.gethostname()}.{os.getpid()}."
    specs = generator_specs(here, directory, url, learner_ranks=0, prefix=prefix)
    with Supervisor(specs, max_restarts=config.control.max_restarts) as supervisor, stop_on_signals(supervisor):
        supervisor.run()


def _newest_store() -> str:
    directory = find_run(None)
    url = directory.store_url()
    if url is None:
        raise RunError(f"run {directory.path} has no store that is running; start it with `asyncrl up`, or give --store URL")
    return url


def _check_membership(record: StoredRun, config: Config) -> None:
    """What the learner would refuse, said before a model is loaded."""
    if record.release != __version__:
        raise RunError(f"run {record.name} is of asyncrl {record.release}, this is {__version__}; install the same release")
    if record.config_hash != config_hash(config):
        raise RunError(
            f"run {record.name} has another config (hash {record.config_hash}, yours {config_hash(config)}); "
            "leave out --config to use the run's own"
        )
    if record.key_id != key_id(wire_key()):
        raise RunError(
            f"run {record.name} signs its frames with another key; set {WIRE_KEY_VARIABLE} to what run.key in the learner's "
            "run directory holds"
        )
