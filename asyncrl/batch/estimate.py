"""Makes advantages and returns from rewards and measured columns of a whole batch, equal on every rank.

An episode counts once, however many rollouts its conversation has: it is one sequence of the advantages.
Axes in names:  S episodes of the batch, T action tokens of their rollouts in order, before any mask.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.batch.coefficients import Tracker
from asyncrl.batch.turn_columns import in_time, turn_columns
from asyncrl.config import registry
from asyncrl.types import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An algorithm's advantage, and what changes rewards before the advantage sees them."""

    advantage: Callable[[GroupRewards], Tensor]
    max_response_tokens: int
    parts: Sequence[str] = ()  # of the reward; a group from before a resume may lack one (NaN) or have others
    shaping: Sequence[Callable[..., float]] = ()
    penalty: Callable[[Tensor, Tensor], Tensor] | None = None  # KL estimator, if rewards pay for the KL
    targets: Callable[[GroupRewards], Tensor] | None = None  # returns for a critic
    needs: frozenset[str] = frozenset()  # costly columns of the advantage, which sees no others
    tracker: Tracker | None = None  # if the advantage needs what is expected of rows

    def estimate(
        self, groups: Sequence[Group], measured: Mapping[str, Tensor], kl_coefficient: float
    ) -> tuple[GroupRewards, Tensor, Tensor | None]:
        """Return shaped rewards, and advantages and returns of every action token, also of masked ones.

        Tokens are in the order of the rollouts. Returns are the critic's targets; None without a critic.
        """
        rewards = self._rewards(groups, measured)
        if self.penalty is not None:
            kl_T = self.penalty(measured["logprobs_T"], measured["reference_logprobs_T"])
            rewards = replace(rewards, token_rewards_T=-kl_coefficient * kl_T)
        if self.tracker:
            rewards = self.tracker.foretold(rewards, [group.ticket_id for group in groups])
        returns_T = in_time(self.targets, rewards) if self.targets else None
        return rewards, in_time(self.advantage, rewards), returns_T

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
            parts={name: torch.tensor([parts.get(name, np.nan) for parts in given]) for name in self.parts},
            greedy_rewards_group=torch.tensor(greedy) if "greedy_rewards_group" in self.needs else None,
            truncated_S=torch.tensor([rollout.truncated for rollout in firsts]),
            behaviour_logprobs_T=torch.from_numpy(
                np.concatenate([rollout.behaviour_logprobs[rollout.action_mask] for rollout in rollouts])
            ),
            **turn_columns(episodes, always=bool(self.needs & registry.OF_TURNS)),
            **{name: column for name, column in measured.items() if name in self.needs},
        )

    def _shape(self, rollout: Rollout, response_tokens: int) -> float:
        reward = rollout.reward
        known = {"max_response_tokens": self.max_response_tokens, "finish_reason": rollout.finish_reason}
        for shape in self.shaping:
            reward = shape(reward, response_tokens=response_tokens, **known)
        return reward
