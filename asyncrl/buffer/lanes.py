"""What learner and generators make of the config: lanes, the limits of their groups, and the intake."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.intake import Intake
from asyncrl.buffer.judge import Gate, make_judge
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.shards import ShardedBuffer, ShardedIntake, join, ledgers_of, shard_names
from asyncrl.columns import KEPT_COUNTS, KEPT_IDS, TEACHER
from asyncrl.config import registry
from asyncrl.config.resolved import wants_greedy
from asyncrl.config.schema import Config
from asyncrl.hosting.machine import routing_sizes
from asyncrl.lineage import History
from asyncrl.types import Group


def train_lane(config: Config, connection: StoreConnection) -> RedisBuffer | ShardedBuffer:
    """Open the lane of training tickets."""
    shards = config.store.shards
    rules = BufferRules(
        groups=config.batch.groups // shards,
        lease_s=config.generator.lease_s,
        max_attempts=config.reward.attempts,
        max_bytes=int(config.store.max_gib * 2**30) // shards,
    )
    names = shard_names("train", shards)
    lanes = [RedisBuffer(connection, config.run.name, rules, lane=name) for name in names]
    return lanes[0] if shards == 1 else ShardedBuffer(lanes)


def eval_lane(config: Config, connection: StoreConnection, lane: str, prompts: int) -> RedisBuffer:
    """Open a lane of held-out evaluation. A round has `prompts` groups."""
    rules = BufferRules(groups=prompts, lease_s=config.generator.lease_s, max_attempts=config.reward.attempts)
    rules = replace(rules, max_bytes=int(config.store.max_gib * 2**30))
    return RedisBuffer(connection, config.run.name, rules, lane=lane)


def group_limits(config: Config, vocabulary: int) -> tuple[GroupLimits, GroupLimits]:
    """Return what a group must satisfy (to be trained on, to count in held-out evaluation)."""
    truncates = config.sampling.top_k > 0
    limits = GroupLimits(
        vocabulary=vocabulary,
        rollouts=config.batch.group_size,
        max_tokens=min(config.sampling.max_tokens, config.learner.tokens_per_microbatch),
        sizes={**routing_sizes(config.model), **({"token_ids": vocabulary} if truncates else {})},
    )
    # A held-out group with another number of samples was sampled before a resume.
    held_out = replace(limits, rollouts=config.eval.samples, whole=True)
    required = (TEACHER,) if config.teacher else (KEPT_COUNTS, KEPT_IDS) if truncates else ()
    return replace(limits, required=required), held_out


def open_intake(
    config: Config,
    lane: RedisBuffer | ShardedBuffer,
    saved: Mapping[str, Any],
    gate: Gate,
    history: History,
    fault: Callable[[Group], str | None] | None = None,
) -> Intake | ShardedIntake:
    """Continue from the `saved` ledger. Raises ConfigError if the number of shards has changed."""
    shards = config.store.shards
    judge = make_judge(
        [registry.resolve("filter", choice.name, choice.params) for choice in config.algorithm.filters],
        drop_older_than=config.staleness.max_lag if config.staleness.policy == "drop" else config.lag_bound,
        needs_greedy=wants_greedy(config),
        history=history,
        fault=fault,
    )

    intake = partial(
        Intake,
        judge=judge,
        groups=config.batch.groups // shards,
        window=config.window_groups // shards,
        max_lag=config.staleness.max_lag,
        max_refills=config.algorithm.max_refills * shards,  # small shares vary more
        stall_s=config.control.stall_s,
        history=history,
    )
    ledgers = ledgers_of(saved, shards)
    if not isinstance(lane, ShardedBuffer):
        return intake(buffer=lane, ledger=ledgers[0], gate=gate)
    gates = [replace(gate, name_of=partial(join, shard, shards=shards)) for shard in range(shards)]
    parts = zip(lane.shards, ledgers, gates, strict=True)
    return ShardedIntake(tuple(intake(buffer=one, ledger=ledger, gate=own) for one, ledger, own in parts))
