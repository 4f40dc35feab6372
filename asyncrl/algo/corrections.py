"""Importance weights from the behaviour policy to the proximal policy, constant in the loss.

With l = ln pi_proximal - ln mu, clamped to +-20 for each token, the ratio of a token is
    token      exp(l_t)            per-token, biased, low variance
    sequence   exp(sum_t l_t)      unbiased for whole responses, high variance; the sum is clamped, too
    geometric  exp(mean_t l_t)     length-independent distance of a response
A rejected token has weight 0 and counts in the denominators of the loss; otherwise rejections would raise
the weight of kept tokens. Without a proximal column the ratio is 1 (bypass: the loss itself corrects).

`normalise` divides the weights by their mean over the tokens of the optimizer step (level `token`) or over
its sequences (other levels); a rejected one counts as 0. `step` holds the tokens of all ranks and
micro-batches of the optimizer step; without it, `batch` is taken for the whole step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algo.ranges import Level, NonNegative, Positive
from asyncrl.algo.tokens import LOG_RATIO_BOUND, TokenBatch, binary_kl, log_ratio, probabilities, sums


@dataclass(frozen=True, slots=True)
class Correction:
    """Constant weights of one batch."""

    weights_T: Tensor  # float32, 0 where rejected; becomes `TokenBatch.weights_T`
    keep_T: Tensor  # bool, False where rejected
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)  # sums over tokens, by name


def none(batch: TokenBatch) -> Correction:
    """w = 1: neither staleness nor numerical mismatch is corrected."""
    return _correction(torch.ones_like(batch.behaviour_logprobs_T))


def truncate(
    batch: TokenBatch,
    *,
    level: Level = "token",
    cap: Positive = 2.0,
    floor: NonNegative = 0.0,
    normalise: bool = False,
    step: TokenBatch | None = None,
) -> Correction:
    """w = min(max(ratio, floor), cap): truncated importance sampling.

    Source: Espeholt et al. 2018 (arXiv:1802.01561); Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training", for token level with cap 2.
    """
    ratio_T = _ratio_T(batch, level)
    weights_T = _weights(ratio_T, lambda r: r.clamp(floor, cap), step or batch, level, normalise=normalise)
    return _correction(weights_T, truncated=(ratio_T > cap) | (ratio_T < floor))


def mask(
    batch: TokenBatch,
    *,
    level: Level = "token",
    low: NonNegative = 0.5,
    high: Positive = 5.0,
    normalise: bool = False,
    step: TokenBatch | None = None,
) -> Correction:
    """w = ratio inside [low, high], 0 outside. Source: Ling team 2025 (arXiv:2510.18855), IcePop."""

    def is_inside(ratio_T: Tensor) -> Tensor:
        return (ratio_T >= low) & (ratio_T <= high)

    def weigh(ratio_T: Tensor) -> Tensor:
        return torch.where(is_inside(ratio_T), ratio_T, 0.0)

    ratio_T = _ratio_T(batch, level)
    weights_T = _weights(ratio_T, weigh, step or batch, level, normalise=normalise)
    return _correction(weights_T, is_inside(ratio_T))


def reject(
    batch: TokenBatch,
    *,
    high: Positive,
    low: Positive | None = None,
    divergence: Literal["k1", "k2", "k3", "tv", "binary_kl", "binary_kl_max"] = "k1",
    level: Level = "sequence",
    weights: Literal["none", "token", "sequence"] = "token",
    cap: Positive = 2.0,
) -> Correction:
    """w = min(ratio, cap) where a divergence from the behaviour policy is within bounds, 0 elsewhere.

    Args:
        high: upper bound: on the ratio for k1; on l^2 / 2 for k2 and on exp(l) - 1 - l for k3, in nats; on
            |p - q| for tv; on KL(q || p) of the sampled token against all others for binary_kl, in nats, and
            on the larger of KL(q || p) and KL(p || q) for binary_kl_max. q is the token's probability under
            mu, p under pi_proximal.
        low: lower bound on the ratio for k1, 1 / high by default; the other divergences have no lower bound.
        divergence: the quantity that is bounded.
        level: measures the divergence at each token, summed over a sequence, or averaged (geometric).
        weights: level of the kept weights; with `none` they are 1.

    Source: Liu et al. 2025, "When speed kills stability", for geometric k1 at sequence level; Qi et al. 2026
    (arXiv:2602.04879) for tv and binary_kl; KPop of Ring-2.6 (2026) for binary_kl_max at token level.
    """
    if divergence == "k1":
        ratio_T = _ratio_T(batch, level)
        keep_T = (ratio_T >= (1.0 / high if low is None else low)) & (ratio_T <= high)
    else:
        keep_T = batch.at_level(_divergence_T(batch, divergence), level) <= high
    if weights == "none":
        return _correction(torch.ones_like(batch.behaviour_logprobs_T), keep_T)
    return _correction(_ratio_T(batch, weights).clamp(max=cap), keep_T)


def veto(
    batch: TokenBatch, *, low: NonNegative = 1e-4, high: Positive = 1e4, cap: Positive = 2.0
) -> Correction:
    """w = min(token ratio, cap), but 0 for every token of a sequence with a token ratio outside [low, high].

    After a token that the policy practically never samples, all later tokens have a context out of its reach.
    """
    ratio_T = _ratio_T(batch, "token")
    is_outlier_T = (ratio_T < low) | (ratio_T > high)
    keep_T = (batch.sum_S(is_outlier_T.float()) == 0)[batch.sequence_T]
    return _correction(ratio_T.clamp(max=cap), keep_T)


def m2po(
    batch: TokenBatch, *, limit: Positive = 0.04, cap: Positive = 2.0, step: TokenBatch | None = None
) -> Correction:
    """w = min(token ratio, cap), but 0 for the tokens of the step with the largest l^2.

    As many tokens are rejected as it takes for the mean l^2 of all others to be at most `limit`, in nats^2;
    tokens of equal l^2 stay or go together. Source: Zheng et al. 2025 (arXiv:2510.01161).
    """
    squares_T = _log_ratio_T(step or batch).double().square().sort().values
    means_T = squares_T.cumsum(0) / torch.arange(1, squares_T.numel() + 1, device=squares_T.device)
    too_large_T = torch.where(means_T > limit, squares_T, torch.inf)
    bound = torch.cat([too_large_T, too_large_T.new_tensor([torch.inf])]).amin()
    keep_T = _log_ratio_T(batch).double().square() < bound
    return _correction(_ratio_T(batch, "token").clamp(max=cap), keep_T)


def combined(correction: Correction, rejections: Sequence[Correction]) -> Correction:
    """The weights of `correction` where it and all `rejections` keep the token, 0 elsewhere."""
    if not rejections:
        return correction
    keep_T = correction.keep_T
    for other in rejections:
        keep_T = keep_T & other.keep_T
    weights_T = torch.where(keep_T, correction.weights_T, 0.0)
    return Correction(weights_T, keep_T, {**correction.metrics, **sums(rejected=~keep_T)})


def log_linear(behaviour_logprobs_T: Tensor, logprobs_T: Tensor, lag_T: Tensor) -> Tensor:
    """ln pi_proximal = ln mu + a (ln pi - ln mu), a = (lag - 1) / lag: needs no forward pass.

    [T], constant in the loss: on the line from the behaviour policy to the current one, `lag` versions newer;
    the proximal policy is a version behind that. A token of lag 0 or 1 keeps its behaviour log-probability.

    Args:
        lag_T: int64, version being made minus version that sampled the token.

    Source: AReaL (Fu et al. 2025, arXiv:2505.24298), its log-linear approximation.
    """
    share_T = (1.0 - 1.0 / lag_T.clamp(min=1)).clamp(min=0.0)
    logprobs_T = logprobs_T.detach()
    # As in every ratio, the distance counts up to the bound; so the line is finite for an infinite ln mu.
    behaviour_logprobs_T = behaviour_logprobs_T.clamp(
        logprobs_T - LOG_RATIO_BOUND, logprobs_T + LOG_RATIO_BOUND
    )
    return behaviour_logprobs_T + share_T * (logprobs_T - behaviour_logprobs_T)


def _weights(
    ratio_T: Tensor, weigh: Callable[[Tensor], Tensor], step: TokenBatch, level: Level, *, normalise: bool
) -> Tensor:
    """`weigh` of the ratios; `normalise` divides them by their mean over the whole step, kept above 0."""
    if not normalise:
        return weigh(ratio_T)
    step_T = weigh(_ratio_T(step, level))
    counted = step_T if level == "token" else step.mean_S(step_T)[step.lengths_S > 0]
    return weigh(ratio_T) / counted.mean().clamp(min=torch.finfo(counted.dtype).tiny)


def _log_ratio_T(batch: TokenBatch) -> Tensor:
    return log_ratio(batch.anchor_logprobs_T.detach(), batch.behaviour_logprobs_T)


def _ratio_T(batch: TokenBatch, level: Level) -> Tensor:
    """[T]: ratio at the level, the same for all tokens of a sequence unless the level is token."""
    return batch.at_level(_log_ratio_T(batch), level).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _divergence_T(batch: TokenBatch, divergence: str) -> Tensor:
    l_T = _log_ratio_T(batch)
    if divergence == "k2":
        return 0.5 * l_T.square()
    if divergence == "k3":
        return torch.expm1(l_T) - l_T
    p_T, q_T = probabilities(batch.anchor_logprobs_T, batch.behaviour_logprobs_T)
    if divergence == "tv":
        return (p_T - q_T).abs()
    kl_T = binary_kl(p_T, q_T)
    return kl_T if divergence == "binary_kl" else torch.maximum(kl_T, binary_kl(q_T, p_T))


def _correction(weights_T: Tensor, keep_T: Tensor | None = None, **counted: Tensor) -> Correction:
    keep_T = torch.ones_like(weights_T, dtype=torch.bool) if keep_T is None else keep_T
    return Correction(torch.where(keep_T, weights_T, 0.0), keep_T, sums(rejected=~keep_T, **counted))
