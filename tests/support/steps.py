"""A step of the learner with groups and rollouts of a few tokens."""

from dataclasses import replace

import numpy as np
import torch

from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.batch.packing import TrainSample
from asyncrl.batch.plan import Plan
from asyncrl.buffer.intake import Collected
from asyncrl.learner import Step
from asyncrl.trainer.base import StepResult
from asyncrl.types import Group, Rollout, Turns, VersionSpan


def rollout(**parts: float) -> Rollout:
    return Rollout(
        prompt_ids=np.array([1], dtype=np.int32),
        response_ids=np.array([2, 3], dtype=np.int32),
        action_mask=np.array([True, True]),
        behaviour_logprobs=np.array([-1.0, -1.0], dtype=np.float32),
        version_spans=(VersionSpan(0, 2),),
        finish_reason="stop",
        reward=sum(parts.values()),
        reward_parts=parts,
    )


def beginning(rollout: Rollout, mask: np.ndarray, turns: Turns) -> Rollout:
    """The first tokens of a rollout, as many as `mask` has, with these actions and turns."""
    size = len(mask)
    return replace(
        rollout,
        response_ids=rollout.response_ids[:size],
        action_mask=mask,
        behaviour_logprobs=np.where(mask, rollout.behaviour_logprobs[:size], np.float32(0.0)),
        version_spans=tuple(VersionSpan(int(version), 1) for version in rollout.versions[:size]),
        turns=turns,
    )


def step(*rollouts: Rollout, results: tuple[StepResult, ...] = ()) -> Step:
    group = Group(ticket_id=1, rollouts=rollouts, generator_id="g", finished_version=0)
    sequence = TrainSample(
        prompt_ids=np.array([1], dtype=np.int32),
        response_ids=np.array([2, 3], dtype=np.int32),
        keep=np.array([True, True]),
        behaviour_logprobs=np.zeros(2, dtype=np.float32),
        advantages=np.zeros(2, dtype=np.float32),
        lag=np.zeros(2, dtype=np.int64),
    )
    count = len(rollouts)
    rewards = GroupRewards(
        rewards_S=torch.tensor([one.reward for one in rollouts]),
        group_S=torch.zeros(count, dtype=torch.int64),
        num_groups=1,
        lengths_S=torch.full((count,), 2),
        sequence_T=torch.arange(count).repeat_interleave(2),
        parts=dict.fromkeys(("a", "old", "new", "none"), torch.zeros(count)),
    )
    return Step(
        version=1,
        collected=Collected(groups=[group], takes=1),
        plan=Plan(minibatches=(), sequences=(sequence,) * count, rewards=rewards),
        results=results,
        seconds={"train": 1.0},
    )


def group(rewards: list[float], lengths: list[int], ticket_id: int = 1) -> Group:
    """Rollouts of these rewards and lengths."""
    rollouts = [
        replace(
            rollout(a=reward),
            response_ids=np.zeros(length, dtype=np.int32),
            action_mask=np.ones(length, dtype=bool),
            behaviour_logprobs=np.zeros(length, dtype=np.float32),
            version_spans=(VersionSpan(0, length),),
        )
        for reward, length in zip(rewards, lengths, strict=True)
    ]
    return Group(ticket_id=ticket_id, rollouts=tuple(rollouts), generator_id="g", finished_version=0)
