"""Makes advantages and returns from rewards and measured columns of a whole batch, equal on every rank.

An episode counts once, however many rollouts its conversation has: it is one sequence of the advantages.
Axes in names:  S episodes of the batch, T action tokens of their rollouts in order, before any mask.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.batch.turn_columns import in_time, turn_columns
from asyncrl.types import Group, Rollout


class Estimates(NamedTuple):
    """The rewards of one batch, and what the advantage made of them."""

    rewards: GroupRewards  # after shaping; tokens in the order of the rollouts
    advantages_T: Tensor
    returns_T: Tensor | None  # the critic's targets; None without a critic


RowOf = Callable[[int], int]  # from a ticket's id


class Tracker:
    """The discounted mean reward of each row. It is equal on every rank, and a part of the checkpoint."""

    def __init__(self, row: RowOf, *, decay: float) -> None:
        """`decay` is what is left of the weight of earlier rewards after each batch with their row."""
        self._row, self._decay = row, decay
        self._found: dict[int, tuple[float, float]] = {}  # row -> sum and number of rewards, both discounted

    def foretold(self, rewards: GroupRewards, tickets: Sequence[int]) -> GroupRewards:
        """Return rewards with the columns `row_S` and `expected_S`; the groups are of these tickets."""
        rows, unknown = [self._row(ticket) for ticket in tickets], _unknown(rewards)
        sums = torch.tensor([self._found.get(row, unknown) for row in rows], dtype=torch.float64)
        row_S, expected_S = (of_G[rewards.group_S] for of_G in (torch.tensor(rows), sums[:, 0] / sums[:, 1]))
        return replace(rewards, row_S=row_S, expected_S=expected_S)

    def record(self, rewards: GroupRewards) -> None:
        """Take in a batch that has been planned. One with a reward that is not finite changes nothing."""
        if not (totals_S := rewards.totals_S).isfinite().all():
            return
        unknown = _unknown(rewards)
        rows, index_S = np.unique(rewards.column("row_S").numpy(), return_inverse=True)
        sums, counts = np.bincount(index_S, totals_S.numpy()), np.bincount(index_S)
        for row, total, count in zip(rows.tolist(), sums.tolist(), counts.tolist(), strict=True):
            before, number = self._found.get(row, unknown)
            self._found[row] = self._decay * before + total, self._decay * number + count

    def state(self) -> dict[str, list[float]]:
        """Return plain values for the checkpoint's JSON, which keeps every bit of them."""
        return {str(row): [*found] for row, found in self._found.items()}

    def resume(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from the `state()` before a restart."""
        self._found = {int(row): (total, number) for row, (total, number) in state.items()}


def _unknown(rewards: GroupRewards) -> tuple[float, float]:
    """A row that was never trained begins with the mean of the batch, as one reward."""
    return float(rewards.totals_S.mean()), 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An algorithm's advantage, and what changes rewards before the advantage sees them."""

    advantage: Callable[[GroupRewards], Tensor]
    max_response_tokens: int
    parts: Sequence[str] = ()  # of the reward; a group from before a resume may lack one (0) or have others
    shaping: Sequence[Callable[..., float]] = ()
    penalty: Callable[[Tensor, Tensor], Tensor] | None = None  # KL estimator, if rewards pay for the KL
    targets: Callable[[GroupRewards], Tensor] | None = None  # returns for a critic
    needs_greedy: bool = False
    needs_turns: bool = False
    tracker: Tracker | None = None  # if the advantage needs what is expected of rows

    def estimate(
        self, groups: Sequence[Group], measured: Mapping[str, Tensor], kl_coefficient: float
    ) -> Estimates:
        """Return advantages and returns of every action token, also of masked ones."""
        rewards = self._rewards(groups, measured)
        if self.penalty is not None:
            kl_T = self.penalty(measured["logprobs_T"], measured["reference_logprobs_T"])
            rewards = replace(rewards, token_rewards_T=-kl_coefficient * kl_T)
        if self.tracker:
            rewards = self.tracker.foretold(rewards, [group.ticket_id for group in groups])
        returns_T = in_time(self.targets, rewards) if self.targets else None
        return Estimates(rewards, in_time(self.advantage, rewards), returns_T)

    def _rewards(self, groups: Sequence[Group], measured: Mapping[str, Tensor]) -> GroupRewards:
        episodes = [episode for group in groups for episode in group.by_episode]
        firsts = [episode[0] for episode in episodes]  # reward and ending are those of the episode
        given = [rollout.reward_parts for rollout in firsts]
        rollouts = [rollout for episode in episodes for rollout in episode]
        lengths_S = torch.tensor([sum(rollout.actions for rollout in episode) for episode in episodes])
        # Greedy rewards are not shaped. If they are needed, the intake has rejected groups without one.
        greedy = [group.greedy_reward for group in groups if group.greedy_reward is not None]
        return GroupRewards(
            rewards_S=torch.tensor(list(map(self._shape, firsts, lengths_S.tolist())), dtype=torch.float32),
            group_S=torch.tensor([g for g, group in enumerate(groups) for _ in range(group.episodes)]),
            num_groups=len(groups),
            lengths_S=lengths_S,
            sequence_T=torch.repeat_interleave(torch.arange(len(episodes)), lengths_S),
            parts={name: torch.tensor([parts.get(name, 0.0) for parts in given]) for name in self.parts},
            greedy_rewards_group=torch.tensor(greedy) if self.needs_greedy else None,
            truncated_S=torch.tensor([rollout.truncated for rollout in firsts]),
            behaviour_logprobs_T=torch.from_numpy(
                np.concatenate([rollout.behaviour_logprobs[rollout.action_mask] for rollout in rollouts])
            ),
            **turn_columns(episodes, always=self.needs_turns),
            **measured,
        )

    def _shape(self, rollout: Rollout, response_tokens: int) -> float:
        reward = rollout.reward
        known = {"max_response_tokens": self.max_response_tokens, "finish_reason": rollout.finish_reason}
        for shape in self.shaping:
            reward = shape(reward, response_tokens=response_tokens, **known)
        return reward
