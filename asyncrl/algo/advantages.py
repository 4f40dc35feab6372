"""Advantage of every action token from the rewards of groups: return minus baseline.

Group-relative estimators give every token of a sequence the same advantage. A group of one has nothing to be compared
with and gets 0, never its raw reward; `metrics.group_metrics` counts such groups. Results are float32 [T].
"""

from typing import Literal

from torch import Tensor

from asyncrl.algo.ranges import Positive
from asyncrl.algo.rewards import GroupRewards


def reinforce(rewards: GroupRewards) -> Tensor:
    """R: the reward itself, no baseline. Source: Williams 1992."""
    return rewards.per_token(rewards.totals_S)


def grpo(
    rewards: GroupRewards,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    std_eps: Positive = 1e-6,
    ddof: Literal[0, 1] = 1,
) -> Tensor:
    """(R - mean_group) / (std + std_eps), with the standard deviation of the group, of the whole batch, or none.

    ddof 1 is the unbiased standard deviation. Source: Shao et al. 2024 (arXiv:2402.03300) sec. 4.1.2.
    """
    totals_S = rewards.totals_S
    centred_S = rewards.centred_S(totals_S)
    if scale == "none":
        return rewards.per_token(centred_S)
    std_S = rewards.group_std_S(totals_S, ddof=ddof) if scale == "group" else _batch_std(totals_S, ddof)
    return rewards.per_token(centred_S / (std_S + std_eps))


def dr_grpo(rewards: GroupRewards) -> Tensor:
    """R - mean_group: dividing by the spread would favour prompts that are nearly solved or nearly hopeless.

    Source: Liu et al. 2025 (arXiv:2503.20783) sec. 3.2.
    """
    return grpo(rewards, scale="none")


def lite_ppo(rewards: GroupRewards, *, std_eps: Positive = 1e-6) -> Tensor:
    """(R - mean_group) / (std_batch + std_eps): the batch's spread is steadier than that of a few rollouts.

    Source: Liu et al. 2025 (arXiv:2508.08221) sec. 4.1.
    """
    return grpo(rewards, scale="batch", std_eps=std_eps)


def rloo(rewards: GroupRewards) -> Tensor:
    """R_i - mean of the other rewards = n / (n - 1) (R_i - mean_group). Source: Ahmadian et al. 2024 (arXiv:2402.14740)."""
    sizes_S = rewards.sizes_S
    return rewards.per_token(rewards.centred_S(rewards.totals_S) * sizes_S / (sizes_S - 1).clamp(min=1))


def _batch_std(values_S: Tensor, ddof: int) -> Tensor:
    centred_S = values_S - values_S.mean()
    return (centred_S.square().sum() / max(values_S.numel() - ddof, 1)).sqrt()
