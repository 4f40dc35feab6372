"""What learner and generators connect alike: the store, the lanes, the wire key, Prometheus."""

import hashlib
import os
import re

from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.config.schema import Config
from asyncrl.evaluation import lane_name
from asyncrl.launch.directory import RunDirectory
from asyncrl.telemetry.exporter import Exporter
from asyncrl.telemetry.prometheus_names import GENERATOR_PREFIX, PREFIX

STORE_VARIABLE = "ASYNCRL_STORE_URL"
WIRE_KEY_VARIABLE = "ASYNCRL_WIRE_KEY"
"""Secret of a run, shared by its learner and generators; frames of anybody else are refused."""


def connect_store(config: Config, url: str, *, retry_s: float = 30.0) -> StoreConnection:
    """A connection; the password comes from the environment, never from the command line."""
    return StoreConnection(url, password=os.environ.get(config.store.password_env), retry_s=retry_s)


def wire_key() -> bytes:
    """Key of the frames' checksums; empty unless the environment holds one."""
    return os.environ.get(WIRE_KEY_VARIABLE, "").encode()


def key_id(key: bytes) -> str:
    """A short name of a key, safe to publish: by it a generator knows whether it has the run's."""
    return hashlib.sha256(b"asyncrl key id " + key).hexdigest()[:12]


def open_exporter(config: Config, directory: RunDirectory, process: str) -> Exporter | None:
    """`/metrics` and `/health` of the learner, or of the generator with the id `process`; None unless asked for."""
    telemetry = config.telemetry
    if telemetry.prometheus_port is None:
        return None
    index = re.search(r"\d+$", process)  # of generators on one machine: g0, g1, ...
    offset = 1 + int(index[0]) if index else 0
    return Exporter(
        host=telemetry.prometheus_host,
        port=telemetry.prometheus_port and telemetry.prometheus_port + offset,
        target=directory.target(process),
        run=config.run.name,
        process=process,
        prefix=GENERATOR_PREFIX if index else PREFIX,
        stall_s=config.control.stall_s,
    )


def train_lane(config: Config, connection: StoreConnection) -> RedisBuffer:
    """The lane of training tickets."""
    rules = BufferRules(
        groups=config.batch.groups,
        lease_s=config.generator.lease_s,
        max_attempts=config.reward.attempts,
        max_bytes=int(config.store.max_gib * 2**30),
    )
    return RedisBuffer(connection, config.run.name, rules, lane="train")


def eval_lane(config: Config, connection: StoreConnection, prompts: int) -> RedisBuffer:
    """The lane of held-out evaluation; one round is `prompts` groups."""
    rules = BufferRules(groups=prompts, lease_s=config.generator.lease_s, max_attempts=config.reward.attempts)
    lane = lane_name(prompts=prompts, every=config.eval.every, steps=config.learner.steps)
    return RedisBuffer(connection, config.run.name, rules, lane=lane)
