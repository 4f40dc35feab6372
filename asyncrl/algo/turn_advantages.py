"""Advantages of episodes of several turns: one per turn, or per token within turns. Results are float32 [T].

Axes in names:  K turns of the batch, S episodes, T action tokens, G groups.
r_k is the reward of a turn: what the environment gave it, plus the rewards of its tokens. The rest of the
episode's reward, which no turn was given, is paid with its last turn. So the r_k of an episode add up to R.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algo.group_rewards import GroupRewards, whiten
from asyncrl.algo.ranges import NonNegative, Positive, Share
from asyncrl.algo.tokens import segment_sum


def turn_rloo(rewards: GroupRewards) -> Tensor:
    """G_k - mean of G_k over the other episodes of the group that reached turn k; G_k is r_k + r_(k+1) + ...

    The mean is 0 if no other episode reached the turn. It does not depend on the episode's own actions, so
    the gradient has no bias, also if the policy decides when an episode ends.
    """
    turns = _turns(rewards)
    to_come_K = _exact(turns.discounted_returns_T(turns.rewards_T, 1.0))
    advantages_K = to_come_K - _mean_of_others(to_come_K, _same_turn_K(turns), turns.sequence_T)[0]
    return rewards.compared_T(advantages_K[rewards.column("turn_T")])


def gigpo(
    rewards: GroupRewards,
    *,
    omega: NonNegative = 1.0,
    gamma: Share = 0.95,
    norm: Literal["none", "std"] = "none",
    std_eps: Positive = 1e-6,
) -> Tensor:
    """A^E + omega A^S: R among the episodes of the group, and G_k among its turns from the same state.

    G_k is the sum of gamma^(j - k) r_j over j >= k. A^S is 0 without a state, or if no other episode has it.

    Args:
        norm: `none` compares with the mean over the other episodes; `std` divides the distance from the mean
            by the standard deviation + std_eps, and counts the turn's own episode in both, as in the paper.

    Source: Feng et al. 2025 (arXiv:2505.10978) eq. 8.
    """
    turns = _turns(rewards)
    to_come_K = _exact(turns.discounted_returns_T(turns.rewards_T, gamma))
    states_K = rewards.column("turn_states_K")
    _, state_K = torch.unique(states_K, return_inverse=True)
    group_K = rewards.group_S[turns.sequence_T]
    _, cell_K = torch.unique(state_K * rewards.num_groups + group_K, return_inverse=True)

    def compared(values: Tensor, cell: Tensor, episode: Tensor) -> Tensor:
        mean, others = _mean_of_others(values, cell, episode)
        found = _z_score(values, cell, std_eps) if norm == "std" else values - mean
        return torch.where(others > 0, found, 0.0)

    every_S = torch.arange(rewards.num_sequences, device=rewards.group_S.device)
    episode_S = compared(rewards.totals_S, rewards.group_S, every_S)
    turn_K = torch.where(states_K == 0, 0.0, compared(to_come_K, cell_K, turns.sequence_T))
    return rewards.compared_T(episode_S[rewards.sequence_T] + omega * turn_K[rewards.column("turn_T")])


def mt_grpo(rewards: GroupRewards, *, outcome_weight: NonNegative = 1.0, std_eps: Positive = 1e-6) -> Tensor:
    """z-score of a turn's reward among the group's k-th turns + outcome_weight * z-score of the outcome.

    The outcome is R without the rewards that the environment gave to turns.

    Warning: this advantage is here for comparisons. If the policy decides when an episode ends, the gradient
    is biased: every further turn subtracts the mean of one more reward, so the baseline depends on the
    actions. An action also gets no credit for the rewards of later turns. `turn_rloo` has neither fault.

    Source: Wei et al. 2025 (arXiv:2505.11821).
    """
    turns = _turns(rewards)
    turn_rewards_K = rewards.column("turn_rewards_K").double()
    paid_S = segment_sum(turn_rewards_K, turns.sequence_T, rewards.num_sequences)
    turn_K = _z_score(turn_rewards_K, _same_turn_K(turns), std_eps)
    outcome_S = _z_score(_exact(rewards.totals_S - paid_S), rewards.group_S, std_eps)
    return (turn_K[rewards.column("turn_T")] + outcome_weight * outcome_S[rewards.sequence_T]).float()


def turn_gae(
    rewards: GroupRewards,
    *,
    gamma: Share = 1.0,
    gae_lambda: Share = 1.0,
    token_gamma: Share = 1.0,
    token_lambda: Share = 1.0,
    whitened: bool = True,
) -> Tensor:
    """GAE over turns, then over the tokens of each turn, whose last token has the turn's advantage.

    The turns have delta_k = r_k + gamma V_(k+1) - V_k with V at the last token of a turn. `gamma` and
    `gae_lambda` are for turns, so a discount does not grow with the length of an answer. Where tokens have
    rewards, those before the last token of turn k + 1 belong to r_k, because V_k lies before them.

    Source: Wang et al. 2025 (VAGEN, arXiv:2510.16907), bi-level GAE.
    """
    advantages_T = _turn_gae(rewards, gamma, gae_lambda, token_gamma * token_lambda, token_gamma)
    return (whiten(advantages_T) if whitened else advantages_T).float()


def turn_value_targets(
    rewards: GroupRewards,
    *,
    gamma: Share = 1.0,
    gae_lambda: Share = 1.0,
    token_gamma: Share = 1.0,
    token_lambda: Share = 1.0,
) -> Tensor:
    """float32 [T]: targets of `turn_gae`'s critic: V + the advantage before whitening."""
    advantages_T = _turn_gae(rewards, gamma, gae_lambda, token_gamma * token_lambda, token_gamma)
    return (advantages_T + rewards.column("values_T").double()).float()


def _turn_gae(
    rewards: GroupRewards, gamma: float, gae_lambda: float, token_decay: float, token_gamma: float
) -> Tensor:
    values_T = rewards.column("values_T").double()
    token_rewards_T = torch.zeros_like(values_T)
    if rewards.token_rewards_T is not None:
        token_rewards_T = rewards.token_rewards_T.double()
    turns, turn_T = _turns(replace(rewards, token_rewards_T=None)), rewards.column("turn_T")
    # The same tokens with turns in the place of sequences: returns and sums then stop at turns.
    tokens = GroupRewards(
        rewards_S=torch.zeros(turns.tokens, device=turn_T.device),
        group_S=rewards.group_S[turns.sequence_T],
        num_groups=rewards.num_groups,
        lengths_S=torch.bincount(turn_T, minlength=turns.tokens),
        sequence_T=turn_T,
    )
    is_last_T = tokens.from_end_T == 0

    def at_last_K(column_T: Tensor) -> Tensor:
        return segment_sum(torch.where(is_last_T, column_T, 0.0), turn_T, turns.tokens)

    before_last_K = segment_sum(token_rewards_T, turn_T, turns.tokens) - at_last_K(token_rewards_T)
    rewards_K = turns.rewards_T + at_last_K(token_rewards_T) + turns.next_T(before_last_K)
    values_K = at_last_K(values_T)
    deltas_K = rewards_K + gamma * turns.next_T(values_K) - values_K
    advantages_K = turns.discounted_returns_T(deltas_K, gamma * gae_lambda)
    deltas_T = token_rewards_T + token_gamma * tokens.next_T(values_T) - values_T
    return tokens.discounted_returns_T(torch.where(is_last_T, advantages_K[turn_T], deltas_T), token_decay)


def _turns(rewards: GroupRewards) -> GroupRewards:
    """The same episodes with turns in the place of tokens: returns and sums then run over turns."""
    rewards_K = rewards.column("turn_rewards_K").double()
    episode_K = rewards.column("episode_K")
    rest_S = rewards.rewards_S.double() - segment_sum(rewards_K, episode_K, rewards.num_sequences)
    if rewards.token_rewards_T is not None:
        token_rewards_T = rewards.token_rewards_T.double()
        rewards_K = rewards_K + segment_sum(token_rewards_T, rewards.column("turn_T"), rewards_K.numel())
    return GroupRewards(
        rewards_S=rest_S,
        group_S=rewards.group_S,
        num_groups=rewards.num_groups,
        lengths_S=torch.bincount(episode_K, minlength=rewards.num_sequences),
        sequence_T=episode_K,
        token_rewards_T=rewards_K,
    )


def _same_turn_K(turns: GroupRewards) -> Tensor:
    """int64 [K]: one number for the k-th turns of a group."""
    number_K = turns.positions_T
    longest = int(number_K.max()) + 1 if number_K.numel() else 0
    return turns.group_S[turns.sequence_T] * longest + number_K


def _sizes(cell: Tensor) -> Tensor:
    """int64: the number of values in the cell of each."""
    return torch.bincount(cell)[cell]


def _sum(values: Tensor, cell: Tensor) -> Tensor:
    """The sum over the cell, one for each value."""
    return segment_sum(values, cell, int(cell.max()) + 1 if cell.numel() else 0)[cell]


def _mean_of_others(values: Tensor, cell: Tensor, episode: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the cell's values of other episodes, 0 where there are none, and their number.

    A later value of the same episode depends on its earlier actions, so its use would bias the gradient.
    """
    _, own = torch.unique(torch.stack((cell, episode)), dim=1, return_inverse=True)
    others = _sizes(cell) - _sizes(own)
    return (_sum(values, cell) - _sum(values, own)) / others.clamp(min=1), others


def _z_score(values: Tensor, cell: Tensor, std_eps: float) -> Tensor:
    """Distance from the cell's mean / (unbiased standard deviation + std_eps); 0 for a single value."""
    centred = values - _sum(values, cell) / _sizes(cell)
    std = (_sum(centred.square(), cell) / (_sizes(cell) - 1).clamp(min=1)).sqrt()
    return centred / (std + std_eps)


def _exact(values: Tensor) -> Tensor:
    """Round to float32, so that sums in float64 are exact and equal values have advantages of exactly 0."""
    return values.float().double()
