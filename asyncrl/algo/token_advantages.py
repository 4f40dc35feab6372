"""Advantages that differ from token to token of a sequence: returns, critics, per-token baselines.

The sequence's reward is paid at its last action token. Results are float32 [T].
"""

import torch
from torch import Tensor

from asyncrl.algo.group_rewards import GroupRewards, whiten
from asyncrl.algo.ranges import Positive, Share
from asyncrl.algo.tokens import log_ratio, segment_sum

WEIGHT_EPS = 1e-8


def gae(
    rewards: GroupRewards,
    *,
    gamma: Share = 1.0,
    gae_lambda: Share = 1.0,
    length_alpha: Positive | None = None,
    critic_lambda: Share | None = None,
    bootstrap: bool = False,
    whitened: bool = True,
) -> Tensor:
    """sum_k (gamma lambda)^k delta_(t+k), delta_t = r_t + gamma V_(t+1) - V_t; whitened over the batch.

    Args:
        length_alpha: replaces `gae_lambda` by 1 - 1 / (length_alpha * length), at least 0, of each response.
        critic_lambda: lambda of the returns that the critic is trained on; null: that of the advantages.
        bootstrap: after the last token of a response that was cut off, V is that of the last token instead of
            0, because the response would have continued (the state after the last token is not evaluated).

    Source: Schulman et al. 2015 (arXiv:1506.02438) eq. 16; Yue et al. 2025 (arXiv:2504.05118), VAPO, for the
    two lambdas.
    """
    advantages_T = _gae(rewards, gamma, _lambda(rewards, gae_lambda, length_alpha), bootstrap)
    return (whiten(advantages_T) if whitened else advantages_T).float()


def value_targets(
    rewards: GroupRewards,
    *,
    gamma: Share = 1.0,
    gae_lambda: Share = 1.0,
    length_alpha: Positive | None = None,
    critic_lambda: Share | None = None,
    bootstrap: bool = False,
) -> Tensor:
    """float32 [T]: targets of `gae`'s critic: V + the advantage before whitening, by the critic's lambda."""
    decay = _lambda(rewards, gae_lambda, length_alpha) if critic_lambda is None else critic_lambda
    return (_gae(rewards, gamma, decay, bootstrap) + rewards.column("values_T").double()).float()


def reinforce_plus_plus(rewards: GroupRewards, *, gamma: Share = 1.0) -> Tensor:
    """Discounted returns, whitened over the tokens of the batch. Source: Hu 2025 (arXiv:2501.03262)."""
    return whiten(rewards.discounted_returns_T(rewards.rewards_T, gamma)).float()


def remax(rewards: GroupRewards) -> Tensor:
    """Return from each token on minus the reward of the greedy response to the same prompt.

    Source: Li et al. 2023 (arXiv:2310.10505).
    """
    greedy_S = rewards.column("greedy_rewards_group").double()[rewards.group_S]
    return (rewards.discounted_returns_T(rewards.rewards_T, 1.0) - greedy_S[rewards.sequence_T]).float()


def optimal_token_baseline(
    rewards: GroupRewards, *, zero_tail: bool = True, weight_cap: Positive | None = None
) -> Tensor:
    """R_t - b_t, b = sum_i W_i R_i / sum_i W_i: per group and position, the baseline of least variance.

    W_t is the sum, up to the token, of 1 - 2 pi + sum_v pi_v^2, the squared gradient norm of a
    log-probability with respect to its logits.

    Args:
        zero_tail: no baseline where only one sequence of the group is as long: the baseline would be the
            sequence's own return and the advantage 0.
        weight_cap: for gradients with importance weights: multiplies each token's part of W by min(pi / mu,
            weight_cap)^2, the square of the weight that `truncate` gives the token.

    Source: Li et al. 2026, "The optimal token baseline", ICML.
    """
    probs_T = rewards.column("logprobs_T").double().clamp(max=0.0).exp()
    gradient_norms_T = 1.0 - 2.0 * probs_T + rewards.column("sum_squared_probs_T").double()
    if weight_cap is not None:
        behaviour_logprobs_T = rewards.column("behaviour_logprobs_T").double()
        ratio_T = log_ratio(rewards.column("logprobs_T").double(), behaviour_logprobs_T).exp()
        gradient_norms_T = gradient_norms_T * ratio_T.clamp(max=weight_cap).square()
    weights_T = rewards.running_sum_T(gradient_norms_T)
    returns_T = rewards.discounted_returns_T(rewards.rewards_T, 1.0)

    position_T = rewards.positions_T
    width = int(position_T.max()) + 1 if rewards.tokens else 0
    cell_T = rewards.group_S[rewards.sequence_T] * width + position_T

    def over_group_T(values_T: Tensor) -> Tensor:
        return segment_sum(values_T, cell_T, rewards.num_groups * width)[cell_T]

    baseline_T = over_group_T(weights_T * returns_T) / (over_group_T(weights_T) + WEIGHT_EPS)
    if zero_tail:
        baseline_T = torch.where(over_group_T(torch.ones_like(returns_T)) == 1, 0.0, baseline_T)
    return rewards.compared_T(returns_T - baseline_T)


def _gae(rewards: GroupRewards, gamma: float, gae_lambda: float | Tensor, bootstrap: bool) -> Tensor:
    values_T = rewards.column("values_T").double()
    following_T = rewards.next_T(values_T)
    if bootstrap:
        was_cut_T = rewards.column("truncated_S")[rewards.sequence_T] & (rewards.from_end_T == 0)
        following_T = torch.where(was_cut_T, values_T, following_T)
    deltas_T = rewards.rewards_T + gamma * following_T - values_T
    return rewards.discounted_returns_T(deltas_T, gamma * gae_lambda)


def _lambda(rewards: GroupRewards, gae_lambda: float, length_alpha: float | None) -> float | Tensor:
    """One lambda for all sequences, or [S]."""
    if length_alpha is None:
        return gae_lambda
    return (1.0 - 1.0 / (length_alpha * rewards.lengths_S.double())).clamp(min=0.0)
