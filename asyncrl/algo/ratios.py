"""Probability ratios that cannot overflow, and the sums that losses report.

`min` and `clamp` after `exp` are not enough: they back-propagate 0 * inf = NaN. So the log-ratio is clamped first.
"""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""exp(20) = 4.9e8 squares and sums in float32 without overflow; a ratio that far out carries no information."""

PROBABILITY_EPS = 1e-8


def log_ratio(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """[T]: ln(numerator / denominator), clamped to +-20; the denominator is a constant.

    Finite, with a finite gradient, for any denominator but NaN. NaN stays NaN: a broken model must show.
    """
    return (numerator_T - denominator_T.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def probabilities(numerator_T: Tensor, denominator_T: Tensor) -> tuple[Tensor, Tensor]:
    """p and q of the sampled tokens, constants; a log-probability above 0 counts as certain."""
    return numerator_T.detach().clamp(max=0.0).exp(), denominator_T.detach().clamp(max=0.0).exp()


def binary_kl(p_T: Tensor, q_T: Tensor) -> Tensor:
    """[T]: KL(q || p) in nats of two outcomes, the sampled token and all others."""
    sampled_T = torch.where(q_T > 0, q_T * ((q_T + PROBABILITY_EPS) / (p_T + PROBABILITY_EPS)).log(), 0.0)
    return sampled_T + (1 - q_T) * ((1 - q_T + PROBABILITY_EPS) / (1 - p_T + PROBABILITY_EPS)).log()


def sums(**columns: Tensor) -> dict[str, float]:
    """Sum of each column in float64, with one transfer from the device for all of them."""
    totals = torch.stack([column.detach().sum(dtype=torch.float64) for column in columns.values()])
    return dict(zip(columns, totals.tolist(), strict=True))
