"""Advantage of every action token from the rewards of groups: return minus baseline.

Group-relative estimators give all tokens of a sequence the same advantage. In a group of one it is 0, because
there is nothing to compare with; `metrics.group_metrics` counts such groups. Results are float32 [T].
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algo.group_rewards import GroupRewards, whiten
from asyncrl.algo.ranges import Positive, Share, ZeroOrOne
from asyncrl.errors import ConfigError


def reinforce(rewards: GroupRewards) -> Tensor:
    """R: the reward itself, no baseline. Source: Williams 1992."""
    return rewards.per_token(rewards.totals_S)


def grpo(
    rewards: GroupRewards,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    std_eps: Positive = 1e-6,
    ddof: ZeroOrOne = 1,
) -> Tensor:
    """(R - mean_group) / (std + std_eps), std of the group, of the whole batch, or none.

    ddof 1 is the unbiased standard deviation. Source: Shao et al. 2024 (arXiv:2402.03300).
    """
    totals_S = rewards.totals_S
    centred_S = rewards.centred_S(totals_S)
    if scale == "none":
        return rewards.per_token(centred_S)
    std_S = rewards.group_std_S(totals_S, ddof=ddof) if scale == "group" else _batch_std(totals_S, ddof)
    return rewards.per_token(centred_S / (std_S + std_eps))


def dr_grpo(rewards: GroupRewards) -> Tensor:
    """R - mean_group: dividing by the spread would favour prompts that are nearly solved or nearly hopeless.

    Source: Liu et al. 2025 (arXiv:2503.20783).
    """
    return grpo(rewards, scale="none")


def lite_ppo(rewards: GroupRewards, *, std_eps: Positive = 1e-6) -> Tensor:
    """(R - mean_group) / (std_batch + std_eps): the batch's spread is steadier than that of a few rollouts.

    Source: Liu et al. 2025 (arXiv:2508.08221).
    """
    return grpo(rewards, scale="batch", std_eps=std_eps)


def rloo(rewards: GroupRewards, *, normalise: bool = False, std_eps: Positive = 1e-4) -> Tensor:
    """R_i - mean of the other rewards = n / (n - 1) (R_i - mean_group).

    Args:
        normalise: divide by the standard deviation of the batch's advantages, whose mean is 0, + std_eps.

    Source: Ahmadian et al. 2024 (arXiv:2402.14740); normalised as in TRL.
    """
    sizes_S = rewards.sizes_S
    advantages_S = rewards.centred_S(rewards.totals_S) * sizes_S / (sizes_S - 1).clamp(min=1)
    if normalise:
        advantages_S = advantages_S / (_batch_std(advantages_S, 1) + std_eps)
    return rewards.per_token(advantages_S)


def opo(rewards: GroupRewards) -> Tensor:
    """R - sum(length R) / sum(length) over the group: the length-weighted baseline has the least variance.

    Source: Hao et al. 2025 (arXiv:2505.23585).
    """
    return rewards.per_token(rewards.centred_S(rewards.totals_S, rewards.lengths_S))


def spo(rewards: GroupRewards, *, decay: Share = 0.9) -> Tensor:
    """R - v, whitened over the sequences; v = a / (a + b) is of the prompt's rewards in earlier batches.

    After a batch a <- decay a + R and b <- decay b + 1 - R: the mean of a Beta posterior that forgets. Only a
    and a + b are kept (`batch.coefficients`), so R may have any range. A batch decays a row once.

    Args:
        decay: rho, here a constant; the paper's is 2^(-KL since the last answer / D_half), in [0.875, 0.96].

    Source: Xu and Ding 2025 (arXiv:2509.13232), without the eight answers to each prompt before training.
    """
    return rewards.per_token(whiten(rewards.totals_S - rewards.column("expected_S")))


def gpg(rewards: GroupRewards) -> Tensor:
    """a (R - mean_group), with a = sequences of the batch / sequences of groups whose rewards differ.

    The factor makes up for groups without a gradient. Source: Chu et al. 2025 (arXiv:2504.02546).
    """
    centred_S = rewards.centred_S(rewards.totals_S)
    informative = (rewards.group_max_S(centred_S.abs()) > 0).sum().clamp(min=1)
    return rewards.per_token(centred_S * rewards.num_sequences / informative)


def grpo_passk(
    rewards: GroupRewards, *, scale: Literal["group", "none"] = "group", std_eps: Positive = 1e-6
) -> Tensor:
    """(best - second) / (std_group + std_eps) for the best of a group, 0 for the others and on a tie.

    Maximises pass@k for k, the size of the group. Source: Tang et al. 2025 (arXiv:2503.19595).
    """
    totals_S = rewards.totals_S
    is_best_S = totals_S == rewards.group_max_S(totals_S)
    second_S = rewards.group_max_S(totals_S.masked_fill(is_best_S, -torch.inf))
    is_alone_S = rewards.group_sum_S(is_best_S.double()) == 1
    gain_S = torch.where(is_best_S & is_alone_S & (rewards.sizes_S > 1), totals_S - second_S, 0.0)
    if scale == "group":
        gain_S = gain_S / (rewards.group_std_S(totals_S, ddof=1) + std_eps)
    return rewards.per_token(gain_S)


def maxrl(rewards: GroupRewards, *, mean_eps: Positive = 1e-6) -> Tensor:
    """(R - mean_group) / (mean_group + mean_eps), 0 where the mean is not positive: maximises ln P(success).

    Rewards must not be negative. Source: Tajwar et al. 2026 (arXiv:2602.02710).
    """
    totals_S = rewards.totals_S
    mean_S = rewards.group_sum_S(totals_S) / rewards.sizes_S
    return rewards.per_token(torch.where(mean_S > 0, rewards.centred_S(totals_S) / (mean_S + mean_eps), 0.0))


def gdpo(
    rewards: GroupRewards, *, weights: Mapping[str, float] | None = None, std_eps: Positive = 1e-6
) -> Tensor:
    """GRPO for each part of the reward, weighted and added up, whitened over the tokens of the batch.

    Normalising each part before the sum keeps distinct combinations of parts distinct.

    Args:
        weights: weight of each part by name, 1 by default; parts that are not named are left out.

    Source: Liu et al. 2026 (arXiv:2601.05242).
    """
    if rewards.token_rewards_T is not None:
        raise ConfigError("advantage `gdpo` has no place for a KL reward; set algorithm.kl.placement to loss")
    chosen = dict.fromkeys(rewards.parts, 1.0) if weights is None else dict(weights)
    if not chosen or not chosen.keys() <= rewards.parts.keys():
        raise ConfigError(
            f"advantage `gdpo` weighs the parts {sorted(chosen)}; the reward has {sorted(rewards.parts)}"
        )
    combined_S = torch.zeros_like(rewards.rewards_S, dtype=torch.float64)
    for name, weight in chosen.items():
        part_S = rewards.parts[name].double()
        # An answer without the part is in neither mean nor spread, and gets nothing for it.
        given_S, part_S = (~part_S.isnan()).double(), part_S.nan_to_num()
        spread_S = rewards.group_std_S(part_S, ddof=1, weights_S=given_S)
        scaled_S = rewards.centred_S(part_S, given_S) / (spread_S + std_eps)
        combined_S += weight * torch.where(given_S > 0, scaled_S, 0.0)
    return _whiten_compared(combined_S, rewards)


def reinforce_plus_plus_baseline(rewards: GroupRewards) -> Tensor:
    """R - mean_group, whitened over the tokens of the batch. Source: Hu 2025 (arXiv:2501.03262)."""
    return _whiten_compared(rewards.centred_S(rewards.totals_S), rewards)


def _whiten_compared(values_S: Tensor, rewards: GroupRewards) -> Tensor:
    """[T]: whitened over the tokens of all groups of two and more; 0 in a group of one."""
    is_compared_T = (rewards.sizes_S > 1)[rewards.sequence_T]
    advantages_T = torch.zeros(rewards.tokens, dtype=values_S.dtype, device=values_S.device)
    advantages_T[is_compared_T] = whiten(values_S[rewards.sequence_T][is_compared_T])
    return advantages_T.float()


def _batch_std(values_S: Tensor, ddof: int) -> Tensor:
    centred_S = values_S - values_S.mean()
    return (centred_S.square().sum() / max(values_S.numel() - ddof, 1)).sqrt()
