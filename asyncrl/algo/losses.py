"""Policy losses of single tokens: pure functions of tensors, one value per action token.

With A the advantage, w the constant importance weight of the correction (behaviour to proximal, `batch.weights_T`),
d = ln pi - ln pi_anchor clamped to +-20 and r = exp(d), where the anchor is the proximal policy, or the behaviour
policy if there is none. Nothing is averaged here: aggregation divides once, by the counts of the whole optimizer step.
`clip_low` and `clip_high` are distances from 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.algo.ranges import AboveOne, NonNegative, Share
from asyncrl.algo.ratios import log_ratio, sums
from asyncrl.algo.tokens import TokenBatch


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of every action token, and sums over tokens for metrics."""

    losses_T: Tensor
    """Differentiable, importance weights included."""
    metrics: Mapping[str, float] = field(default_factory=dict)


def ppo_clip(
    batch: TokenBatch,
    logprobs_T: Tensor,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = None,
) -> TokenLoss:
    """-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), at most w dual_clip |A| where A < 0.

    With a proximal policy this is decoupled PPO; clip_high > clip_low is DAPO's clip-higher; dual_clip is also the
    two-sided clip (`delta`) of others.
    Source: Schulman et al. 2017 (arXiv:1707.06347) eq. 7; Hilton et al. 2021 (arXiv:2110.00641) eq. 4;
    Yu et al. 2025 (arXiv:2503.14476) sec. 3.1; Ye et al. 2019 (arXiv:1912.09729) eq. 5.
    """
    ratio_T = log_ratio(logprobs_T, batch.anchor_logprobs_T).exp()
    losses_T, metrics = clipped_surrogate(ratio_T, batch.advantages_T, clip_low, clip_high)
    if dual_clip is not None:
        ceiling_T = -batch.advantages_T * dual_clip
        beyond_T = (batch.advantages_T < 0) & (losses_T > ceiling_T)
        losses_T = torch.where(beyond_T, ceiling_T, losses_T)
        metrics |= sums(dual_clipped=beyond_T)
    return TokenLoss(batch.weighted(losses_T), metrics)


def reinforce(batch: TokenBatch, logprobs_T: Tensor) -> TokenLoss:
    """-w A ln pi: no ratio, no clip. Also GPG's loss (Chu et al. 2025, arXiv:2504.02546). Source: Williams 1992."""
    return TokenLoss(batch.weighted(-batch.advantages_T * logprobs_T))


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, float]]:
    """-min(r A, clip(r) A), and how many tokens the clip took out of the gradient on either side."""
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    return losses_T, sums(
        clipped_low=(advantages_T < 0) & (ratio_T < 1.0 - clip_low),
        clipped_high=(advantages_T > 0) & (ratio_T > 1.0 + clip_high),
    )
