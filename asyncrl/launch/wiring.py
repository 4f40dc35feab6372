"""What learner and generators connect alike: the store, the lanes, the wire key, Prometheus."""

import os
import re
from typing import Any

from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.shards import ShardedBuffer, shard_names
from asyncrl.buffer.users import user_of
from asyncrl.config.resolved import eval_digest
from asyncrl.config.schema import Config
from asyncrl.evaluation import lane_name
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import JoinKeys, RunKeys, join_keys, process_keys
from asyncrl.telemetry.exporter import GENERATOR_PREFIX, PREFIX, Exporter

STORE_VARIABLE = "ASYNCRL_STORE_URL"


def connect_store(config: Config, url: str, *, keys: RunKeys | JoinKeys | None = None, retry_s: float = 30.0) -> StoreConnection:
    """A connection. The password of a configured store comes from the environment, that of the run's own from `keys`.

    `keys` are this process's unless given; the user in `url` says which password is meant.
    """
    if config.store.url is None:
        password = (keys or process_keys()).store_password(user_of(url))
    else:
        password = os.environ.get(config.store.password_env)
    return StoreConnection(url, password=password, retry_s=retry_s)


def join_store(config: Config, url: str) -> StoreConnection:
    """For a role's process, which then forgets the password: neither engines nor rewards inherit it."""
    connection = connect_store(config, url)
    os.environ.pop(config.store.password_env, None)
    return connection


def wire_key() -> bytes:
    """Key of the checksums of this run's frames and messages."""
    return join_keys().wire


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


def train_limits(config: Config, vocabulary: int) -> GroupLimits:
    """Of groups that this run can train on."""
    return GroupLimits(vocabulary=vocabulary, rollouts=config.batch.group_size, max_tokens=_most_tokens(config))


def eval_limits(config: Config, vocabulary: int) -> GroupLimits:
    """Of held-out groups: those of another number of samples are of before a resume."""
    return GroupLimits(vocabulary=vocabulary, rollouts=config.eval.samples, max_tokens=_most_tokens(config), whole=True)


def _most_tokens(config: Config) -> int:
    return min(config.sampling.max_tokens, config.learner.tokens_per_microbatch)


def train_lane(config: Config, connection: StoreConnection) -> ShardedBuffer:
    """The lane of training tickets."""
    shards = config.store.shards
    rules = BufferRules(
        groups=config.batch.groups // shards,
        lease_s=config.generator.lease_s,
        max_attempts=config.reward.attempts,
        max_bytes=int(config.store.max_gib * 2**30) // shards,
    )
    names = shard_names("train", shards)
    return ShardedBuffer([RedisBuffer(connection, config.run.name, rules, lane=name) for name in names])


def eval_rules(config: Config, prompts: int) -> dict[str, Any]:
    """What an id of the evaluation lane means, with so many held-out prompts."""
    return {"prompts": prompts, "every": config.eval.every, "steps": config.learner.steps, "asked": eval_digest(config)}


def eval_lane(config: Config, connection: StoreConnection, prompts: int) -> RedisBuffer:
    """The lane of held-out evaluation; one round is `prompts` groups."""
    rules = BufferRules(groups=prompts, lease_s=config.generator.lease_s, max_attempts=config.reward.attempts)
    return RedisBuffer(connection, config.run.name, rules, lane=lane_name(**eval_rules(config, prompts)))
