"""From collected groups to packed micro-batches: rewards, advantages, masks, counts. Every rank computes the same plan.

Axes in names:  S sequences (rollouts) of the batch, T action tokens of the batch before any mask.
"""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.rewards import GroupRewards
from asyncrl.trainer.base import MicroBatch
from asyncrl.trainer.packing import Sequence, microbatch, pack, share_out
from asyncrl.types import Group, Rollout

Advantage = Callable[[GroupRewards], torch.Tensor]
Shaping = Callable[..., float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What the plan depends on."""

    max_lag: int
    mask_stale: bool
    """True: tokens older than `max_lag` leave the loss."""
    mask_truncated: bool
    max_response_tokens: int
    minibatches: int
    tokens_per_microbatch: int
    rank: int
    ranks: int
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimizer step: this rank's micro-batches, and the counts over all ranks that losses are divided by."""

    microbatches: tuple[MicroBatch, ...]
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One batch of groups, ready to train on."""

    minibatches: tuple[Minibatch, ...]
    sequences: tuple[Sequence, ...]
    """Of all ranks, in group order."""
    rewards: GroupRewards
    """Shaped, as the advantages saw them."""


def make_plan(
    groups: Sequenced[Group], version: int, *, advantage: Advantage, shaping: Sequenced[Shaping], settings: PlanSettings
) -> Plan:
    """Advantages over whole groups first, then masks, then packing: a masked token still counts for the baseline."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    shaped_S = np.array([_shape(rollout, shaping, settings.max_response_tokens) for rollout in rollouts], dtype=np.float32)
    rewards = _group_rewards(groups, rollouts, shaped_S)
    advantages_T = advantage(rewards).numpy()
    ends = np.cumsum([int(rollout.action_mask.sum()) for rollout in rollouts])
    sequences = tuple(
        _sequence(rollout, part, version, settings)
        for rollout, part in zip(rollouts, np.split(advantages_T, ends[:-1]), strict=True)
    )
    per_minibatch = len(groups) // settings.minibatches
    bounds = np.cumsum([0] + [len(group.rollouts) for group in groups])[::per_minibatch]
    minibatches = tuple(_minibatch(sequences[start:stop], settings) for start, stop in itertools.pairwise(bounds))
    return Plan(minibatches=minibatches, sequences=sequences, rewards=rewards)


def _shape(rollout: Rollout, shaping: Sequenced[Shaping], max_response_tokens: int) -> float:
    reward = rollout.reward
    for shape in shaping:
        reward = shape(
            reward,
            response_tokens=len(rollout.response_ids),
            max_response_tokens=max_response_tokens,
            finish_reason=rollout.finish_reason,
        )
    return reward


def _group_rewards(groups: Sequenced[Group], rollouts: Sequenced[Rollout], shaped_S: NDArray[np.float32]) -> GroupRewards:
    lengths_S = torch.tensor([int(rollout.action_mask.sum()) for rollout in rollouts])
    names = sorted({name for rollout in rollouts for name in rollout.reward_parts})
    return GroupRewards(
        rewards_S=torch.from_numpy(shaped_S),
        group_S=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(group.rollouts) for group in groups])),
        num_groups=len(groups),
        lengths_S=lengths_S,
        sequence_T=torch.repeat_interleave(torch.arange(len(rollouts)), lengths_S),
        parts={name: torch.tensor([rollout.reward_parts.get(name, 0.0) for rollout in rollouts]) for name in names},
    )


def _sequence(rollout: Rollout, action_advantages: NDArray[np.float32], version: int, settings: PlanSettings) -> Sequence:
    lag = version - rollout.versions
    keep = rollout.action_mask.copy()
    if settings.mask_stale:
        keep &= lag <= settings.max_lag
    if settings.mask_truncated and rollout.finish_reason == "length":
        keep[:] = False
    advantages = np.zeros(len(rollout.response_ids), dtype=np.float32)
    advantages[rollout.action_mask] = action_advantages
    return Sequence(
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        keep=keep,
        behaviour_logprobs=rollout.behaviour_logprobs,
        advantages=advantages,
        lag=lag,
    )


def _minibatch(sequences: Sequenced[Sequence], settings: PlanSettings) -> Minibatch:
    trained = [sequence for sequence in sequences if sequence.keep.any()]
    lengths = [len(sequence.prompt_ids) + len(sequence.response_ids) for sequence in trained]
    bins = share_out(pack(lengths, settings.tokens_per_microbatch), settings.ranks, lengths)[settings.rank]
    return Minibatch(
        microbatches=tuple(microbatch([trained[i] for i in members], settings.device) for members in bins),
        counts=Counts(tokens=int(sum(sequence.keep.sum() for sequence in trained)), sequences=len(trained)),
    )
