"""Losses of policy and critic: pure functions of tensors, one value per action token.

A is the advantage, w the constant importance weight of the correction (behaviour to proximal,
`batch.weights_T`), d = ln pi - ln pi_anchor clamped to +-20, r = exp(d). The anchor is the proximal policy,
or the behaviour policy if there is none. Nothing is averaged here: aggregation divides once, by the counts of
the whole optimizer step. `clip_low` and `clip_high` are distances from 1. Micro-batches never cut a sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.algo.ranges import AboveOne, Level, NonNegative, Positive, PositiveShare, Share
from asyncrl.algo.tokens import TokenBatch, binary_kl, log_ratio, policy_ratio, probabilities, sums
from asyncrl.errors import ConfigError

SHARE_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of every action token, and sums over tokens for metrics."""

    losses_T: Tensor  # differentiable, with importance weights
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)
    left_out_T: Tensor | None = None  # bool, tokens that the loss leaves out; None if it trains all tokens


def ppo_clip(
    batch: TokenBatch,
    logprobs_T: Tensor,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = None,
    level: Level = "token",
    max_drift: Positive | None = None,
    top_entropy: PositiveShare = 1.0,
    entropy_T: Tensor | None = None,
) -> TokenLoss:
    """-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), at most w dual_clip |A| where A < 0.

    With a proximal policy this is decoupled PPO; clip_high > clip_low is DAPO's clip-higher.

    Args:
        dual_clip: bound on the loss where A < 0; above 1 + clip_high, TRL's two-sided clip `delta`.
        level: takes the ratio of each token, or of its response as product (with seq-mean-token-sum, PPO with
            the response as action) or geometric mean (`gspo` has the narrow clip that a mean needs).
        max_drift: leaves out a sequence with A < 0 whose mean drift from the behaviour policy is larger, in
            nats per token (`within_drift`).
        top_entropy: trained share of each sequence's tokens, those of highest entropy
            (`highest_entropy`).
        entropy_T: float32 in nats; without it, `top_entropy` below 1 raises ConfigError.

    Source: Schulman et al. 2017 (arXiv:1707.06347) eq. 7; Hilton et al. 2021 (arXiv:2110.00641);
    Yu et al. 2025 (arXiv:2503.14476) sec. 3.1; Ye et al. 2019 (arXiv:1912.09729).
    """
    ratio_T = policy_ratio(batch, logprobs_T, level)
    losses_T, metrics = _clipped_surrogate(ratio_T, batch.advantages_T, clip_low, clip_high)
    if dual_clip is not None:
        ceiling_T = -batch.advantages_T * dual_clip
        beyond_T = (batch.advantages_T < 0) & (losses_T > ceiling_T)
        losses_T = torch.where(beyond_T, ceiling_T, losses_T)
        metrics |= sums(dual_clipped=beyond_T)
    keep_T = None if max_drift is None else within_drift(batch, logprobs_T, max_drift)
    if top_entropy < 1.0:
        if entropy_T is None:
            raise ConfigError(f"top_entropy is {top_entropy}, but no entropies were computed; set it to 1.0")
        high_T = highest_entropy(batch, entropy_T, top_entropy)
        keep_T = high_T if keep_T is None else keep_T & high_T
    if keep_T is None:
        return TokenLoss(batch.weighted(losses_T), metrics)
    losses_T = torch.where(keep_T, losses_T, 0.0)
    return TokenLoss(batch.weighted(losses_T), metrics | sums(left_out=~keep_T), ~keep_T)


def reinforce(batch: TokenBatch, logprobs_T: Tensor) -> TokenLoss:
    """-w A ln pi. Also GPG's loss (Chu et al. 2025, arXiv:2504.02546). Source: Williams 1992."""
    return TokenLoss(batch.weighted(-batch.advantages_T * logprobs_T))


def truncated_reinforce(batch: TokenBatch, logprobs_T: Tensor, *, cap: Positive = 2.0) -> TokenLoss:
    """-w stop_gradient(min(r, cap)) A ln pi: the loss itself corrects; for `proximal: behaviour`.

    Source: Espeholt et al. 2018 (arXiv:1802.01561).
    """
    return cispo(batch, logprobs_T, clip_low=None, clip_high=cap - 1.0)


def cispo(
    batch: TokenBatch, logprobs_T: Tensor, *, clip_low: Share | None = 0.2, clip_high: NonNegative = 0.2
) -> TokenLoss:
    """-w stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A ln pi: every token keeps a gradient.

    clip_low null means no lower bound, as in TRL and ScaleRL (whose cap of 5 is clip_high 4).
    Source: MiniMax 2025 (arXiv:2506.13585).
    """
    ratio_T = log_ratio(logprobs_T.detach(), batch.anchor_logprobs_T).exp()
    low = 0.0 if clip_low is None else 1.0 - clip_low
    clipped_T = ratio_T.clamp(low, 1.0 + clip_high)
    metrics = sums(clipped_low=ratio_T < low, clipped_high=ratio_T > 1.0 + clip_high)
    return TokenLoss(batch.weighted(-clipped_T * batch.advantages_T * logprobs_T), metrics)


def sapo(
    batch: TokenBatch,
    logprobs_T: Tensor,
    *,
    tau_positive: Positive = 1.0,
    tau_negative: Positive = 1.05,
    level: Level = "token",
) -> TokenLoss:
    """-w (4 / tau) sigmoid(tau (r - 1)) A, tau chosen by the sign of A: a smooth gate instead of a clip.

    Source: Gao et al. 2025 (arXiv:2511.20347).
    """
    ratio_T = policy_ratio(batch, logprobs_T, level)
    tau_T = torch.where(batch.advantages_T > 0, tau_positive, tau_negative)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1.0)) * 4.0 / tau_T
    return TokenLoss(batch.weighted(-gate_T * batch.advantages_T))


def dro(batch: TokenBatch, logprobs_T: Tensor, *, beta: Positive) -> TokenLoss:
    """-w (A ln pi - beta / 2 d^2): a quadratic pull to the anchor instead of a clip; beta has the unit of A.

    Source: Richemond et al. 2024 (arXiv:2405.19107).
    """
    d_T = log_ratio(logprobs_T, batch.anchor_logprobs_T)
    return TokenLoss(batch.weighted(0.5 * beta * d_T.square() - batch.advantages_T * logprobs_T))


def cfpo(batch: TokenBatch, logprobs_T: Tensor, *, epsilon: Positive = 0.2) -> TokenLoss:
    """w (|A| / (2 epsilon) (r - 1)^2 - r A): least at r = 1 + epsilon for A > 0, at 1 - epsilon for A < 0.

    Where `ppo_clip` stops pushing, this pulls back. Source: Cagatay et al. 2026 (arXiv:2601.22801).
    """
    ratio_T = log_ratio(logprobs_T, batch.anchor_logprobs_T).exp()
    pull_T = batch.advantages_T.abs() / (2.0 * epsilon) * (ratio_T - 1.0).square()
    return TokenLoss(batch.weighted(pull_T - ratio_T * batch.advantages_T))


def _clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """[T]: -min(r A, clip(r) A); and how many tokens the clip removed from the gradient on either side."""
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    return losses_T, sums(
        clipped_low=(advantages_T < 0) & (ratio_T < 1.0 - clip_low),
        clipped_high=(advantages_T > 0) & (ratio_T > 1.0 + clip_high),
    )


def within_drift(batch: TokenBatch, logprobs_T: Tensor, limit: float) -> Tensor:
    """bool [T]: A >= 0, or the sequence's mean of ln mu - ln pi is at most `limit`.

    A bad response that the current policy would no longer give teaches nothing.
    Source: DeepSeek-V3.2 2025 (arXiv:2512.02556), off-policy sequence masking.
    """
    drift_T = -log_ratio(logprobs_T.detach(), batch.behaviour_logprobs_T)
    return (batch.advantages_T >= 0) | (batch.mean_S(drift_T) <= limit)[batch.sequence_T]


def highest_entropy(batch: TokenBatch, entropy_T: Tensor, share: float) -> Tensor:
    """bool [T]: the ceil(share * length) tokens of each sequence with the highest entropy.

    The choice is made within each sequence, not over the micro-batch as in the paper: it must not depend on
    how the batch was cut. Source: Wang et al. 2025 (arXiv:2506.01939), forking tokens.
    """
    by_entropy = entropy_T.detach().argsort(descending=True, stable=True)
    order = by_entropy[batch.sequence_T[by_entropy].argsort(stable=True)]
    lengths_S = batch.lengths_S
    first_T = (lengths_S.cumsum(0) - lengths_S)[batch.sequence_T]
    rank_T = torch.empty_like(order)
    rank_T[order] = torch.arange(batch.tokens, device=order.device) - first_T
    # Without the slack, rounding would add a token: 0.07 * 100 is 7.000000000000001.
    return rank_T < (lengths_S.double() * share - SHARE_SLACK).ceil()[batch.sequence_T]


def gspo(
    batch: TokenBatch, logprobs_T: Tensor, *, clip_low: Share = 3e-4, clip_high: NonNegative = 4e-4
) -> TokenLoss:
    """-w min(s A, clip(s) A), s = exp(mean_t d) of the sequence, its gradient through each token's own ln pi.

    With seq-mean-token-mean this is the paper's sequence form; other aggregations weigh sequences by length.
    The clip is narrow because the ratio of a mean stays within about a thousandth of 1. Source: Zheng et al.
    2025 (arXiv:2507.18071), the GSPO-token form.
    """
    ratio_T = policy_ratio(batch, logprobs_T, "geometric")
    losses_T, metrics = _clipped_surrogate(ratio_T, batch.advantages_T, clip_low, clip_high)
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
    """Mask a token by the distance between its probabilities, instead of clipping its ratio.

    A ratio is large for a rare token that hardly moved and small for a common one that moved a lot. p is the
    probability of the sampled token now, q its probability under the anchor. Masks and ratios are constants;
    the gradient is that of -A ln pi. Source: Qi et al. 2026 (arXiv:2602.04879), DPPO, binary divergences.
    """
    is_good_T = batch.advantages_T > 0
    high_T, low_T = is_good_T & too_high_T, ~is_good_T & too_low_T
    ratio_T = log_ratio(logprobs_T.detach(), batch.anchor_logprobs_T).exp()
    losses_T = torch.where(high_T | low_T, 0.0, -ratio_T.clamp(max=cap) * batch.advantages_T * logprobs_T)
    if pull:
        losses_T = losses_T + pull * log_ratio(logprobs_T, batch.anchor_logprobs_T).square()
    metrics = sums(clipped_low=low_T, clipped_high=high_T, capped=(ratio_T > cap) & ~high_T & ~low_T)
    return TokenLoss(batch.weighted(losses_T), metrics)


def clip_cov(
    batch: TokenBatch,
    logprobs_T: Tensor,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    share: Share = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> TokenLoss:
    """PPO's clipped loss without a random `share` of all tokens, drawn within the covariance bounds.

    At least one token is left out if any qualifies. Tokens that the clip has removed already are not drawn.
    """
    ratio_T = log_ratio(logprobs_T, batch.anchor_logprobs_T).exp()
    losses_T, metrics = _clipped_surrogate(ratio_T, batch.advantages_T, clip_low, clip_high)
    covariance_T = _covariance(batch, logprobs_T)
    is_clipped_T = ratio_T.detach() * batch.advantages_T > -losses_T.detach()
    is_high_T = (covariance_T > covariance_low) & (covariance_T < covariance_high)
    (candidates,) = torch.where(is_high_T & ~is_clipped_T)
    drawn = candidates[torch.randperm(len(candidates), device=candidates.device)[: _number(batch, share)]]
    keep_T = torch.ones_like(losses_T, dtype=torch.bool)
    keep_T[drawn] = False
    losses_T = torch.where(keep_T, losses_T, 0.0)
    return TokenLoss(batch.weighted(losses_T), metrics | sums(left_out=~keep_T), ~keep_T)


def kl_cov(
    batch: TokenBatch, logprobs_T: Tensor, *, share: Share = 2e-4, coefficient: NonNegative = 0.1
) -> TokenLoss:
    """-w r A, plus coefficient |d| on the `share` of tokens with the highest covariance (at least one)."""
    d_T = log_ratio(logprobs_T, batch.anchor_logprobs_T)
    highest = _covariance(batch, logprobs_T).topk(min(_number(batch, share), batch.tokens)).indices
    penalised_T = torch.zeros_like(d_T, dtype=torch.bool)
    penalised_T[highest] = True
    losses_T = -d_T.exp() * batch.advantages_T + torch.where(penalised_T, coefficient * d_T.abs(), 0.0)
    return TokenLoss(batch.weighted(losses_T), sums(penalised=penalised_T))


def _covariance(batch: TokenBatch, logprobs_T: Tensor) -> Tensor:
    """(A - mean A)(ln pi - mean ln pi); the loss restrains the tokens where it is largest.

    It and the number of these tokens are taken over the micro-batch. So `clip_cov` and `kl_cov`, and no other
    losses, depend on how the batch was cut; give them large micro-batches.
    Source: Cui et al. 2025 (arXiv:2505.22617).
    """
    logprobs_T = logprobs_T.detach()
    return (batch.advantages_T - batch.advantages_T.mean()) * (logprobs_T - logprobs_T.mean())


def _number(batch: TokenBatch, share: float) -> int:
    return max(int(share * batch.tokens), 1)


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: Positive | None = 0.5
) -> TokenLoss:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2; clip null: (V - R)^2 / 2.

    Args:
        values_T: values of the current critic, with gradient.
        old_values_T: the values that the advantages were computed from.
        returns_T: targets, from `token_advantages.value_targets`.

    Source: Schulman et al. 2017, openai/baselines ppo2.
    """
    errors_T = (values_T - returns_T).square()
    if clip is None:
        return TokenLoss(0.5 * errors_T)
    clipped_T = torch.clamp(values_T, old_values_T - clip, old_values_T + clip)
    clipped_errors_T = (clipped_T - returns_T).square()
    losses_T = 0.5 * torch.maximum(errors_T, clipped_errors_T)
    return TokenLoss(losses_T, sums(value_clipped=clipped_errors_T > errors_T))


def explained_variance(values_T: Tensor, returns_T: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 is perfect, 0 is no better than a constant. 0 if all returns are equal."""
    spread = returns_T.double().var(correction=0)
    unexplained = (returns_T.double() - values_T.double()).var(correction=0)
    return float(1.0 - unexplained / spread) if spread > 0 else 0.0
