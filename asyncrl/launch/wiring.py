"""What learner and generators make from the same config: lanes, group limits, store password, exporter."""

import re
from collections.abc import Mapping

from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.shards import ShardedBuffer, shard_names
from asyncrl.buffer.users import user_of
from asyncrl.config.resolved import eval_digest
from asyncrl.config.schema import Config
from asyncrl.config.store import StoreConfig
from asyncrl.evaluation import Rounds
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import JoinKeys, RunKeys
from asyncrl.telemetry.exporter import GENERATOR_PREFIX, PREFIX, Exporter


def store_password(
    store: StoreConfig, url: str, keys: RunKeys | JoinKeys, environment: Mapping[str, str]
) -> str | None:
    """Return the password: from `environment` for a configured store, from `keys` for the run's own."""
    return keys.store_password(user_of(url)) if store.url is None else environment.get(store.password_env)


def open_exporter(config: Config, directory: RunDirectory, process: str) -> Exporter | None:
    """Serve `/metrics` and `/health` of the learner or generator named `process`; None unless asked for."""
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


def group_limits(config: Config, vocabulary: int) -> tuple[GroupLimits, GroupLimits]:
    """Return what a group must satisfy (to be trained on, to count in held-out evaluation)."""
    max_tokens = min(config.sampling.max_tokens, config.learner.tokens_per_microbatch)
    return (
        GroupLimits(vocabulary=vocabulary, rollouts=config.batch.group_size, max_tokens=max_tokens),
        # A held-out group with another number of samples was sampled before a resume.
        GroupLimits(vocabulary=vocabulary, rollouts=config.eval.samples, max_tokens=max_tokens, whole=True),
    )


def train_lane(config: Config, connection: StoreConnection) -> RedisBuffer | ShardedBuffer:
    """Open the lane of training tickets."""
    shards = config.store.shards
    rules = BufferRules(
        groups=config.batch.groups // shards,
        lease_s=config.generator.lease_s,
        max_attempts=config.reward.attempts,
        max_bytes=int(config.store.max_gib * 2**30) // shards,
    )
    if shards == 1:
        return RedisBuffer(connection, config.run.name, rules, lane="train")
    names = shard_names("train", shards)
    return ShardedBuffer([RedisBuffer(connection, config.run.name, rules, lane=name) for name in names])


def eval_lane(config: Config, connection: StoreConnection, prompts: int) -> tuple[Rounds, RedisBuffer]:
    """Open held-out evaluation: its rules, and its lane. A round has `prompts` groups."""
    rounds = Rounds(prompts, config.eval.every, config.learner.steps, eval_digest(config))
    rules = BufferRules(groups=prompts, lease_s=config.generator.lease_s, max_attempts=config.reward.attempts)
    return rounds, RedisBuffer(connection, config.run.name, rules, lane=rounds.lane)
