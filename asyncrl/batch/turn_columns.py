"""The turns of a batch as columns of `GroupRewards`, for the advantages of `turn_advantages`.

Axes in names:  K turns of the batch that have an action, T action tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.errors import ConfigError
from asyncrl.types import Rollout, Turns


def turn_columns(episodes: Sequence[Sequence[Rollout]], *, always: bool = False) -> dict[str, Tensor]:
    """Return the columns by name. If no rollout of the batch has turns, return them only with `always`.

    Turns of an episode are in order of time. A rollout without turns is one. A missing reward or state is 0.
    """
    owned = [(episode, rollout) for episode, rollouts in enumerate(episodes) for rollout in rollouts]
    if not always and all(rollout.turns is None for _, rollout in owned):
        return {}
    turns = [
        rollout.turns or Turns(ends=np.flatnonzero(rollout.action_mask)[-1:].astype(np.int32) + 1)
        for _, rollout in owned
    ]
    counts = [len(one.ends) for one in turns]
    # The turn of the action at offset t is the first one that ends behind t.
    turn_T = [
        first + np.searchsorted(one.ends, np.flatnonzero(rollout.action_mask), side="right")
        for first, one, (_, rollout) in zip(np.cumsum([0, *counts]), turns, owned, strict=False)
    ]
    episode_K = np.repeat([episode for episode, _ in owned], counts)
    order_K = np.concatenate([np.zeros(len(one.ends)) if one.order is None else one.order for one in turns])
    by_time_K = np.lexsort((order_K, episode_K))  # a stable sort
    columns = {
        "episode_K": episode_K,
        "turn_T": np.argsort(by_time_K)[np.concatenate(turn_T)],
        "turn_rewards_K": np.concatenate(
            [np.zeros(len(one.ends), np.float32) if one.rewards is None else one.rewards for one in turns]
        )[by_time_K],
        "turn_states_K": np.concatenate(
            [np.zeros(len(one.ends), np.uint64) if one.states is None else one.states for one in turns]
        )[by_time_K].view(np.int64),
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def in_time(estimate: Callable[[GroupRewards], Tensor], rewards: GroupRewards) -> Tensor:
    """Return [T], `estimate` of each token, which gets the tokens of each episode in the order of time.

    The tokens of `rewards` lie as in the rollouts, one sequence after the other. If an agent and its
    sub-agents took turns, this is another order. Raises ConfigError if there is not one for each token.
    """
    if rewards.turn_T is None:
        return _one_for_each(rewards, estimate(rewards))
    order_T = torch.argsort(rewards.turn_T, stable=True)
    columns_T = {one.name: getattr(rewards, one.name) for one in fields(rewards) if one.name.endswith("_T")}
    ordered = {name: column[order_T] for name, column in columns_T.items() if column is not None}
    return _one_for_each(rewards, estimate(replace(rewards, **ordered)))[torch.argsort(order_T)]


def _one_for_each(rewards: GroupRewards, estimated_T: Tensor) -> Tensor:
    needed, found = list(rewards.sequence_T.shape), list(estimated_T.shape)
    if found != needed:
        text = f"algorithm.advantage returned shape {found}; needed is a number for each action token of"
        raise ConfigError(f"{text} the batch, {needed}: `rewards.per_token` spreads one for each episode")
    return estimated_T


def turn_parts(rewards: GroupRewards) -> Tensor | None:
    """Return the index into `TURNS` of each action token; None without turns. A single turn is the first."""
    if rewards.episode_K is None or rewards.turn_T is None:
        return None
    episode_K = rewards.episode_K
    ends_K = torch.ones_like(episode_K, dtype=torch.bool)
    ends_K[:-1] = episode_K[1:] != episode_K[:-1]
    starts_K = ends_K.roll(1)
    part_K = torch.where(starts_K, 0.0, torch.where(ends_K, 2.0, 1.0))
    return part_K[rewards.turn_T]
