"""Policy losses that mask a token by the distance between its probabilities instead of clipping its ratio.

A ratio is large for a rare token that hardly moved and small for a common one that moved a lot. p is the
probability of the sampled token now, q its probability under the anchor. Masks and ratios are constants; the
gradient is that of -A ln pi. Source: Qi et al. 2026 (arXiv:2602.04879), DPPO with binary divergences.
"""

import torch
from torch import Tensor

from asyncrl.algo.losses import TokenLoss
from asyncrl.algo.ranges import NonNegative, Positive
from asyncrl.algo.ratios import binary_kl, log_ratio, probabilities, sums
from asyncrl.algo.tokens import TokenBatch


def dppo_tv(
    batch: TokenBatch,
    logprobs_T: Tensor,
    *,
    limit_low: NonNegative = 0.2,
    limit_high: NonNegative = 0.2,
    cap: Positive = 3.0,
    pull: NonNegative = 0.0,
) -> TokenLoss:
    """-w min(r, cap) A ln pi, left out where A > 0 and p - q > limit_high, or A <= 0 and q - p > limit_low.

    Args:
        pull: coefficient of w d^2, which pulls every token, also those left out, back to the anchor.

    Source of the pull: Kimi K2.5 2026 (arXiv:2602.02276).
    """
    p_T, q_T = probabilities(logprobs_T, batch.anchor_logprobs_T)
    return _masked(batch, logprobs_T, p_T - q_T > limit_high, q_T - p_T > limit_low, cap=cap, pull=pull)


def dppo_kl(
    batch: TokenBatch,
    logprobs_T: Tensor,
    *,
    limit_low: NonNegative = 0.2,
    limit_high: NonNegative = 0.2,
    cap: Positive = 3.0,
    pull: NonNegative = 0.0,
) -> TokenLoss:
    """-w min(r, cap) A ln pi, left out where KL(q || p) exceeds a limit and p lies where A pushes it.

    The KL is binary (sampled token, any other token), in nats; otherwise as `dppo_tv`.
    """
    p_T, q_T = probabilities(logprobs_T, batch.anchor_logprobs_T)
    kl_T = binary_kl(p_T, q_T)
    too_high_T, too_low_T = (kl_T > limit_high) & (p_T > q_T), (kl_T > limit_low) & (p_T < q_T)
    return _masked(batch, logprobs_T, too_high_T, too_low_T, cap=cap, pull=pull)


def _masked(
    batch: TokenBatch, logprobs_T: Tensor, too_high_T: Tensor, too_low_T: Tensor, *, cap: float, pull: float
) -> TokenLoss:
    is_good_T = batch.advantages_T > 0
    high_T, low_T = is_good_T & too_high_T, ~is_good_T & too_low_T
    ratio_T = log_ratio(logprobs_T.detach(), batch.anchor_logprobs_T).exp()
    losses_T = torch.where(high_T | low_T, 0.0, -ratio_T.clamp(max=cap) * batch.advantages_T * logprobs_T)
    if pull:
        losses_T = losses_T + pull * log_ratio(logprobs_T, batch.anchor_logprobs_T).square()
    metrics = sums(clipped_low=low_T, clipped_high=high_T, capped=(ratio_T > cap) & ~high_T & ~low_T)
    return TokenLoss(batch.weighted(losses_T), metrics)
