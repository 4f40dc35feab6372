"""Checks of one run: its store, model, prompts and reward functions."""

import asyncio
import os
import tempfile
from pathlib import Path

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.probe import SKEW_S, StoreProbe, probe_store
from asyncrl.buffer.run_record import RunRecord
from asyncrl.buffer.server import StoreServer
from asyncrl.config.schema import Config
from asyncrl.config.store import StoreConfig
from asyncrl.errors import DataError
from asyncrl.evaluation import Rounds
from asyncrl.hosting.machine import read_model
from asyncrl.hosting.route import peers_in, with_addresses
from asyncrl.launch.players import Players
from asyncrl.preflight.checks.base import Finding, doubtful, fine, wrong
from asyncrl.preflight.checks.host import port

STORE_RETRY_S = 5.0


def own_store() -> Finding:
    """Check that a store server starts, in a temporary directory, as a run would start it."""
    with (
        tempfile.TemporaryDirectory() as directory,
        StoreServer(StoreConfig(max_gib=0.25), Path(directory)) as server,
    ):
        probe = probe_store(StoreConnection(server.url, retry_s=STORE_RETRY_S))
        return store_finding(probe, "started for the check")


def control_port(config: Config) -> Finding:
    """Check that the learner could listen at `control.bind`."""
    bind = with_addresses(config, peers_in(os.environ)).control.bind
    assert bind is not None
    return port(bind)


def configured_store(config: Config) -> Finding:
    """Check that the store of `store.url` works and serves no other run."""
    assert config.store.url is not None
    password = os.environ.get(config.store.password_env)
    connection = StoreConnection(config.store.url, password=password, retry_s=STORE_RETRY_S)
    finding = store_finding(probe_store(connection, config.run.name), connection.url)
    holder = RunRecord(connection, key=b"").holder()
    if holder not in (None, config.run.name):
        cure = (
            f"add another database number to store.url, or if {holder!r} is over: redis-cli del asyncrl:run"
        )
        return wrong(f"{connection.url} serves run {holder!r}, and a store serves one", cure)
    return finding


def store_finding(probe: StoreProbe, where: str) -> Finding:
    """Judge a probe of the store."""
    millis = f"{probe.seconds * 1000:.0f} ms"
    text = f"{probe.version}, {where}: functions load, noeviction, 1 MiB written and read in {millis}"
    if abs(probe.skew_s) > SKEW_S:
        cure = "let a time service set both clocks, so that logs can be compared: timedatectl set-ntp true"
        return doubtful(f"{text}; its clock is {probe.skew_s:+.1f} s from ours", cure)
    return fine(text)


def model(config: Config) -> Finding:
    """Check without its weights that the model can be read, from disk or the hub, and trained."""
    from asyncrl.trainer.miniature import require_agreement  # slow to import

    path, found = config.model.path, read_model(config.model)[0]
    if (nats := require_agreement(found)) is None:
        said = f"{path}: {found.model_type}, of which no small model can be made"
        return doubtful(said, "start the run: its learner compares itself with transformers first")
    return fine(f"{path}: {found.model_type}, within {nats:.1g} nats of transformers in a small model")


def prompts(config: Config) -> Finding:
    """Check that all prompts can be read and tokenised as in generators."""
    from asyncrl.data.prompts import PromptSource

    source = PromptSource.of(config)
    rounds = Rounds.of(config, [(len(rows), "") for rows in source.held_out])
    held_out = sum(one.prompts for one in rounds.values())
    found = f"{len(source):,} prompts of at most {source.longest} tokens"
    return fine(f"{found}, {held_out} held-out ones for an evaluation")


def rewards(config: Config) -> Finding:
    """Check that the processes of rewards and environment start, and that one seed gives one beginning."""
    from asyncrl.data.prompts import PromptSource

    try:
        prompts = PromptSource.of(config)
    except DataError:
        return fine("not tried without prompts")

    async def load() -> None:
        players = Players.of(config, config.run.root)
        try:
            await players.start(prompts)
        finally:
            await players.close()

    asyncio.run(load())
    said = f"{', '.join(config.reward_parts)} can be loaded"
    if config.reward.sandbox != "none":
        said += f", in {config.reward.sandbox}"
        said += "; as root their number of processes is not limited" if os.getuid() == 0 else ""
    return fine(said)
