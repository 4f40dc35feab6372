"""Policy losses whose ratio is that of a whole sequence. Micro-batches never cut a sequence."""

import torch
from torch import Tensor

from asyncrl.algo.losses import TokenLoss, clipped_surrogate
from asyncrl.algo.ranges import Level, NonNegative, Share
from asyncrl.algo.ratios import log_ratio, policy_ratio, sums
from asyncrl.algo.tokens import TokenBatch


def gspo(
    batch: TokenBatch, logprobs_T: Tensor, *, clip_low: Share = 3e-4, clip_high: NonNegative = 4e-4
) -> TokenLoss:
    """-w min(s A, clip(s) A), s = exp(mean_t d) of the sequence, its gradient through each token's own ln pi.

    With seq-mean-token-mean this is the paper's sequence form; other aggregations weigh sequences by length.
    The clip is narrow because the ratio of a mean stays within about a thousandth of 1. Source: Zheng et al.
    2025 (arXiv:2507.18071), the GSPO-token form.
    """
    ratio_T = policy_ratio(batch, logprobs_T, "geometric")
    losses_T, metrics = clipped_surrogate(ratio_T, batch.advantages_T, clip_low, clip_high)
    return TokenLoss(batch.weighted(losses_T), metrics)


def geo_mean(
    batch: TokenBatch, logprobs_T: Tensor, *, clip_low: NonNegative = 0.4, clip_high: NonNegative = 0.4
) -> TokenLoss:
    """-w A_i exp(mean_t m_t): geometric mean of ratios, each clipped in log space to [-clip_low, clip_high].

    m_t is d_t or its clipped value, whichever gives the smaller objective; A_i is the mean advantage of the
    sequence. Every token has the value of its sequence, so seq-mean-token-mean gives the paper's objective.
    Source: Zhao et al. 2025 (arXiv:2507.20673), GMPO.
    """
    d_T = log_ratio(logprobs_T, batch.anchor_logprobs_T)
    sign_T = batch.advantages_T.sign()
    pessimistic_T = torch.minimum(sign_T * d_T, sign_T * d_T.clamp(-clip_low, clip_high))
    objective_S = batch.mean_S(batch.advantages_T) * batch.mean_S(sign_T * pessimistic_T).exp()
    metrics = sums(
        clipped_low=(sign_T < 0) & (d_T < -clip_low), clipped_high=(sign_T > 0) & (d_T > clip_high)
    )
    return TokenLoss(batch.weighted(-objective_S[batch.sequence_T]), metrics)


def topr(batch: TokenBatch, logprobs_T: Tensor, *, level: Level = "geometric") -> TokenLoss:
    """-w c A ln pi, c a constant: 1 where A > 0, min(s, 1) where A < 0, s the ratio of the sequence.

    A bad answer that the policy has left is pushed down no further; a good one is learnt however rare it is.
    Source: Le Roux et al. 2025 (arXiv:2503.14286), which takes the product (`level: sequence`); the geometric
    mean does not vanish with the length.
    """
    s_T = policy_ratio(batch, logprobs_T.detach(), level)
    is_bad_T = batch.advantages_T < 0
    c_T = torch.where(is_bad_T, s_T.clamp(max=1.0), 1.0)
    metrics = sums(capped=is_bad_T & (s_T > 1.0))
    return TokenLoss(batch.weighted(-c_T * batch.advantages_T * logprobs_T), metrics)


def vespo(
    batch: TokenBatch,
    logprobs_T: Tensor,
    *,
    k_positive: NonNegative = 2.0,
    lambda_positive: NonNegative = 3.0,
    k_negative: NonNegative = 3.0,
    lambda_negative: NonNegative = 2.0,
) -> TokenLoss:
    """-w phi A ln pi, phi = s^k exp(lambda (1 - s)) a constant, s = exp(sum_t d) of the sequence.

    k and lambda are chosen by the sign of A. phi is 1 on-policy and falls to 0 far from it on both sides,
    without a clip and without a mean over the length. With `proximal: behaviour`, s is the ratio to the
    policy that sampled, as in the paper. Source: VESPO 2026 (arXiv:2602.10693); defaults as in TRL.
    """
    s_T = policy_ratio(batch, logprobs_T.detach(), "sequence")
    is_bad_T = batch.advantages_T < 0
    k_T = torch.where(is_bad_T, k_negative, k_positive)
    lambda_T = torch.where(is_bad_T, lambda_negative, lambda_positive)
    phi_T = (k_T * s_T.log() + lambda_T * (1.0 - s_T)).exp()
    return TokenLoss(batch.weighted(-phi_T * batch.advantages_T * logprobs_T))
