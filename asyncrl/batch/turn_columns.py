"""The turns of a batch as columns of `GroupRewards`, for the advantages of `turn_advantages`.

Axes in names:  K turns of the batch that have an action, T action tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.types import Rollout, Turns


def turn_columns(episodes: Sequence[Sequence[Rollout]], *, always: bool = False) -> dict[str, Tensor]:
    """Return the columns by name. If no rollout of the batch has turns, return them only with `always`.

    A rollout without turns is one turn. A turn without a reward has 0. States are missing if no turn has one.
    """
    owned = [(episode, rollout) for episode, rollouts in enumerate(episodes) for rollout in rollouts]
    if not always and all(rollout.turns is None for _, rollout in owned):
        return {}
    turns = [rollout.turns or _one_turn(rollout) for _, rollout in owned]
    counts = [len(one.ends) for one in turns]
    # The turn of the action at offset t is the first one that ends behind t.
    turn_T = [
        first + np.searchsorted(one.ends, np.flatnonzero(rollout.action_mask), side="right")
        for first, one, (_, rollout) in zip(np.cumsum([0, *counts]), turns, owned, strict=False)
    ]
    columns = {
        "episode_K": np.repeat([episode for episode, _ in owned], counts),
        "turn_T": np.concatenate(turn_T),
        "turn_rewards_K": np.concatenate(
            [np.zeros(len(one.ends), np.float32) if one.rewards is None else one.rewards for one in turns]
        ),
    }
    if any(one.states is not None for one in turns):
        states_K = [np.zeros(len(one.ends), np.uint64) if one.states is None else one.states for one in turns]
        columns["turn_states_K"] = np.concatenate(states_K).view(np.int64)
    return {name: torch.from_numpy(column) for name, column in columns.items()}


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


def _one_turn(rollout: Rollout) -> Turns:
    return Turns(ends=np.flatnonzero(rollout.action_mask)[-1:].astype(np.int32) + 1)
