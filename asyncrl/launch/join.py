"""Generators that join a run from this or another host: `asyncrl generator --count 8`."""

import json
import os
import socket
from pathlib import Path

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.run_record import RunRecord
from asyncrl.config.load import load_config
from asyncrl.config.resolved import dump_config
from asyncrl.config.schema import Config, StoreConfig
from asyncrl.errors import RunError
from asyncrl.launch.directory import RunDirectory, find_run
from asyncrl.launch.up import generator_spec, stop_on_signals
from asyncrl.launch.wiring import STORE_VARIABLE, WIRE_KEY_VARIABLE
from asyncrl.supervisor import Supervisor
from asyncrl.telemetry.logs import setup_logging


def run_generators(*, count: int, config_path: Path | None, store_url: str | None) -> None:
    """Start `count` generators, keep them alive, and leave when the run is over."""
    url, local = _find_store(store_url)
    config = load_config(config_path) if config_path else _config_from_store(url)
    directory = RunDirectory(local.path if local else config.run.directory)
    directory.create(fresh=False)
    if local is None:
        directory.config.write_text(dump_config(config))
    else:
        os.environ.setdefault(WIRE_KEY_VARIABLE, directory.secret())
    setup_logging("generators", directory.logs, console=True)
    prefix = f"{socket.gethostname()}.{os.getpid()}"
    specs = [generator_spec(config, directory, url, f"{prefix}.{index}") for index in range(count)]
    with Supervisor(specs, max_restarts=config.control.max_restarts) as supervisor, stop_on_signals(supervisor):
        supervisor.run()


def _find_store(store_url: str | None) -> tuple[str, RunDirectory | None]:
    """(url, the run directory when the run lives on this machine)."""
    url = store_url or os.environ.get(STORE_VARIABLE)
    if url:
        return url, None
    directory = find_run(None)
    url = directory.store_url()
    if url is None:
        raise RunError(f"run {directory.path} has no store that is running; start it with `asyncrl up`, or give --store URL")
    return url, directory


def _config_from_store(url: str) -> Config:
    password = os.environ.get(StoreConfig().password_env)
    record = RunRecord(StoreConnection(url, password=password)).read()
    return Config.model_validate(json.loads(record.config_json))
