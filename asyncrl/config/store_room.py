"""Whether the store holds the groups that can be open at the same time."""

import math
from collections.abc import Iterator

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.base import Mistake
from asyncrl.config.checkpoint_section import CheckpointConfig
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.reward_section import RewardConfig
from asyncrl.config.sections import (
    BatchConfig,
    LearnerConfig,
    SamplingConfig,
    StalenessConfig,
)
from asyncrl.config.store import StoreConfig

# Upper bounds of the bytes that a group takes in the store: per token, per rollout and per group. Those of
# tokens are sums over `columns.COLUMNS`, which needs numpy; `preflight` adds those of routed experts.
PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES, ROLLOUT_BYTES, GROUP_BYTES = 4, 9, 768, 8192
TEACHER_TOKEN_BYTES = 4  # of a response
TURN_BYTES = 64  # of an episode's turn: its end, reward and state, and its spans of versions


def store_holds_what_is_open(
    sampling: SamplingConfig,
    checkpoint: CheckpointConfig,
    staleness: StalenessConfig,
    learner: LearnerConfig,
    batch: BatchConfig,
    store: StoreConfig,
    environment: EnvironmentConfig,
    reward: RewardConfig,
    algorithm: AlgorithmConfig,
) -> Iterator[Mistake]:
    """Yield a mistake if it does not."""
    teacher = algorithm.reference is not None and algorithm.reference.scorers
    token_bytes = RESPONSE_TOKEN_BYTES + (TEACHER_TOKEN_BYTES if teacher else 0)
    rollout_bytes = ROLLOUT_BYTES + PROMPT_TOKEN_BYTES * sampling.max_prompt_tokens
    rollout_bytes += token_bytes * sampling.max_response_tokens
    rollout_bytes += TURN_BYTES * environment.max_turns if environment.is_used else 0
    group_bytes = GROUP_BYTES + batch.group_size * environment.sequences * rollout_bytes
    group_bytes += batch.group_size * reward.judgement_bytes
    yield from lacking_room(checkpoint, staleness, learner, batch, store, environment, group_bytes)


def lacking_room(
    checkpoint: CheckpointConfig,
    staleness: StalenessConfig,
    learner: LearnerConfig,
    batch: BatchConfig,
    store: StoreConfig,
    environment: EnvironmentConfig,
    group_bytes: int,
) -> Iterator[Mistake]:
    """A full store of groups that no checkpoint holds admits no group, so no checkpoint is ever written."""
    lag = staleness.max_lag
    saved = min(checkpoint.keep * checkpoint.every, learner.steps)
    groups = (lag + 1 + saved) * batch.groups
    needed_gib = groups * group_bytes / 2**30
    if needed_gib > store.max_gib:
        sizes = ("batch.group_size", "sampling.max_prompt_tokens", "sampling.max_response_tokens")
        numbers = (
            "staleness.max_lag",
            "checkpoint.keep",
            "checkpoint.every",
            "batch.groups",
            "learner.steps",
        )
        yield Mistake(
            ("store.max_gib", *numbers, *sizes),
            f"store.max_gib is {store.max_gib:g}, but {groups} groups of up to {group_bytes / 2**20:.3g} MiB "
            f"can be open, {needed_gib:.3g} GiB: {lag + 1} steps under way (staleness.max_lag + 1) and "
            f"{saved} that the oldest checkpoint lacks (checkpoint.keep * every), of {batch.groups} groups "
            f"(batch.groups) with {batch.group_size * environment.sequences} sequences of "
            "sampling.max_prompt_tokens and max_response_tokens; a full store would stop the run for good; "
            f"set store.max_gib: {math.ceil(needed_gib)}, or checkpoint more often",
        )
