"""Probability ratios that cannot overflow, and the sums that losses report.

The log-ratio is clamped before `exp`, because `min` and `clamp` after it back-propagate 0 * inf = NaN.
"""

import torch
from torch import Tensor

from asyncrl.algo.ranges import Level
from asyncrl.algo.tokens import TokenBatch

# exp(20) = 4.9e8 squares and sums in float32 without overflow; a ratio that far out carries no information.
LOG_RATIO_BOUND = 20.0

PROBABILITY_EPS = 1e-8


def log_ratio(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """[T]: ln(numerator / denominator), clamped to +-20; the denominator is a constant.

    Finite, with a finite gradient, for any denominator but NaN. NaN stays NaN and shows a broken model.
    """
    return (numerator_T - denominator_T.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def policy_ratio(batch: TokenBatch, logprobs_T: Tensor, level: Level) -> Tensor:
    """[T]: pi / anchor of each token, or of its sequence as product or geometric mean; ln clamped to +-20.

    The gradient of a sequence's ratio goes through each token's own ln pi.
    """
    if level == "token":
        return log_ratio(logprobs_T, batch.anchor_logprobs_T).exp()
    d_T = log_ratio(logprobs_T.detach(), batch.anchor_logprobs_T)
    d_T = batch.at_level(d_T, level).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (logprobs_T - logprobs_T.detach() + d_T).exp()


def probabilities(numerator_T: Tensor, denominator_T: Tensor) -> tuple[Tensor, Tensor]:
    """[T], [T]: p and q of the sampled tokens, as constants; a log-probability above 0 counts as certain."""
    return numerator_T.detach().clamp(max=0.0).exp(), denominator_T.detach().clamp(max=0.0).exp()


def binary_kl(p_T: Tensor, q_T: Tensor) -> Tensor:
    """[T]: KL(q || p) in nats over two outcomes: the sampled token, any other token."""
    sampled_T = torch.where(q_T > 0, q_T * ((q_T + PROBABILITY_EPS) / (p_T + PROBABILITY_EPS)).log(), 0.0)
    return sampled_T + (1 - q_T) * ((1 - q_T + PROBABILITY_EPS) / (1 - p_T + PROBABILITY_EPS)).log()


def sums(**columns: Tensor) -> dict[str, Tensor]:
    """Sum of each column in float64, [], left on its device: `metrics.merge` reads it."""
    return {name: column.detach().sum(dtype=torch.float64) for name, column in columns.items()}
