"""Importance weights from the behaviour policy to the proximal policy, constant in the loss.

With l = ln pi_proximal - ln mu, clamped to +-20 for each token, the ratio of a token is
    token      exp(l_t)            per-token, biased, low variance
    sequence   exp(sum_t l_t)      unbiased for whole responses, high variance; the sum is clamped to +-20, too
    geometric  exp(mean_t l_t)     length-independent distance of a response
A rejected token has weight 0. Denominators of the loss count it all the same: leaving it out would make every kept
kept token heavier the more is rejected. Without a proximal column the ratio is 1 (bypass: the loss itself corrects).

`normalise` divides the weights by their mean over the tokens of the optimizer step, at the other levels over its sequences,
rejected ones counted as 0. The step is `step`, of all ranks and micro-batches; without it `batch` is the whole step.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algo.ranges import NonNegative, Positive
from asyncrl.algo.ratios import LOG_RATIO_BOUND, Level, binary_kl, log_ratio, probabilities, sums
from asyncrl.algo.tokens import TokenBatch


@dataclass(frozen=True, slots=True)
class Correction:
    """Constant weights of one batch."""

    # float32, 0 where rejected: `TokenBatch.weights_T`.
    weights_T: Tensor
    # bool: False where rejected.
    keep_T: Tensor
    # Sums over tokens.
    metrics: Mapping[str, float] = field(default_factory=dict)


def none(batch: TokenBatch) -> Correction:
    """w = 1: staleness and numerical mismatch go uncorrected."""
    return _correction(torch.ones_like(batch.behaviour_logprobs_T), _all(batch))


def truncate(
    batch: TokenBatch,
    *,
    level: Level = "token",
    cap: Positive = 2.0,
    floor: NonNegative = 0.0,
    normalise: bool = False,
    step: TokenBatch | None = None,
) -> Correction:
    """w = ratio, at least floor and at most cap: truncated importance sampling.

    Source: Espeholt et al. 2018 (arXiv:1802.01561); Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training", for token level with cap 2.
    """
    ratio_T = _ratio_T(batch, level)
    weights_T = _weights(ratio_T, lambda ratio_T: ratio_T.clamp(floor, cap), step or batch, level, normalise=normalise)
    return _correction(weights_T, _all(batch), truncated=(ratio_T > cap) | (ratio_T < floor))


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

    ratio_T = _ratio_T(batch, level)
    weights_T = _weights(
        ratio_T, lambda ratio_T: torch.where(is_inside(ratio_T), ratio_T, 0.0), step or batch, level, normalise=normalise
    )
    return _correction(weights_T, is_inside(ratio_T))


def reject(
    batch: TokenBatch,
    *,
    high: Positive,
    low: Positive | None = None,
    divergence: Literal["k1", "k2", "k3", "tv", "binary_kl"] = "k1",
    level: Level = "sequence",
    weights: Literal["none", "token", "sequence"] = "token",
    cap: Positive = 2.0,
) -> Correction:
    """w = min(ratio, cap) where a divergence from the behaviour policy is within bounds, 0 elsewhere.

    Args:
        high: upper bound: on the ratio for k1; on l^2 / 2 for k2 and on exp(l) - 1 - l for k3, in nats; on |p - q| for tv and
            on KL(q || p) of the sampled token against all others for binary_kl, in nats, q by mu and p by pi_proximal.
        low: lower bound on the ratio for k1, 1 / high by default; the others have none.
        divergence: what is bounded.
        level: of the divergence: of each token, summed over a sequence, or its mean over a sequence (geometric).
        weights: level of the kept weights; none is 1.

    Source: Liu et al. 2025, "When speed kills stability", for geometric k1 at sequence level; Qi et al. 2026
    (arXiv:2602.04879) for the two of probabilities.
    """
    keep_T = _within(batch, divergence, level, (1.0 / high if low is None else low, high))
    weights_T = torch.ones_like(batch.behaviour_logprobs_T) if weights == "none" else _ratio_T(batch, weights).clamp(max=cap)
    return _correction(weights_T, keep_T)


def veto(batch: TokenBatch, *, low: NonNegative = 1e-4, high: Positive = 1e4, cap: Positive = 2.0) -> Correction:
    """w = min(token ratio, cap), 0 for a whole sequence in which any token's ratio is outside [low, high].

    One impossible token means that everything after it was sampled from a context the policy would not be in.
    """
    ratio_T = _ratio_T(batch, "token")
    is_outlier_T = (ratio_T < low) | (ratio_T > high)
    keep_T = (batch.sum_S(is_outlier_T.float()) == 0)[batch.sequence_T]
    return _correction(ratio_T.clamp(max=cap), keep_T)


def combined(correction: Correction, rejections: Iterable[Correction]) -> Correction:
    """The weights of the first where none rejects."""
    keep_T = correction.keep_T
    for other in rejections:
        keep_T = keep_T & other.keep_T
    return Correction(torch.where(keep_T, correction.weights_T, 0.0), keep_T, {**correction.metrics, **sums(rejected=~keep_T)})


def _weights(ratio_T: Tensor, weigh: Callable[[Tensor], Tensor], step: TokenBatch, level: Level, *, normalise: bool) -> Tensor:
    """What `weigh` makes of the ratios; normalised: divided by the mean of a whole step, which is never 0."""
    if not normalise:
        return weigh(ratio_T)
    step_T = weigh(_ratio_T(step, level))
    counted = step_T if level == "token" else step.mean_S(step_T)[step.lengths_S > 0]
    return weigh(ratio_T) / counted.mean().clamp(min=torch.finfo(counted.dtype).tiny)


def _log_ratio_T(batch: TokenBatch) -> Tensor:
    return log_ratio(batch.anchor_logprobs_T.detach(), batch.behaviour_logprobs_T)


def _ratio_T(batch: TokenBatch, level: Level) -> Tensor:
    """[T]: ratio at the level, the same for all tokens of a sequence unless the level is token."""
    log_ratio_T = _log_ratio_T(batch)
    if level == "token":
        return log_ratio_T.exp()
    log_ratio_S = batch.sum_S(log_ratio_T) if level == "sequence" else batch.mean_S(log_ratio_T)
    return log_ratio_S.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[batch.sequence_T]


def _within(batch: TokenBatch, divergence: str, level: Level, bounds: tuple[float, float]) -> Tensor:
    """bool [T]"""
    low, high = bounds
    if divergence == "k1":
        ratio_T = _ratio_T(batch, level)
        return (ratio_T >= low) & (ratio_T <= high)
    divergence_T = _divergence_T(batch, divergence)
    if level == "token":
        return divergence_T <= high
    divergence_S = batch.sum_S(divergence_T) if level == "sequence" else batch.mean_S(divergence_T)
    return (divergence_S <= high)[batch.sequence_T]


def _divergence_T(batch: TokenBatch, divergence: str) -> Tensor:
    l_T = _log_ratio_T(batch)
    if divergence == "k2":
        return 0.5 * l_T.square()
    if divergence == "k3":
        return torch.expm1(l_T) - l_T
    p_T, q_T = probabilities(batch.anchor_logprobs_T, batch.behaviour_logprobs_T)
    return (p_T - q_T).abs() if divergence == "tv" else binary_kl(p_T, q_T)


def _all(batch: TokenBatch) -> Tensor:
    return torch.ones_like(batch.sequence_T, dtype=torch.bool)


def _correction(weights_T: Tensor, keep_T: Tensor, **counted: Tensor) -> Correction:
    return Correction(torch.where(keep_T, weights_T, 0.0), keep_T, sums(rejected=~keep_T, **counted))
