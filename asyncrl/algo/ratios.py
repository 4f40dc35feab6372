"""Probability ratios that cannot overflow, and the sums that losses report.

`min` and `clamp` after `exp` are not enough: they back-propagate 0 * inf = NaN. So the log-ratio is clamped first.
"""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""exp(20) = 4.9e8 squares and sums in float32 without overflow; a ratio that far out carries no information."""


def log_ratio(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """[T]: ln(numerator / denominator), clamped to +-20; the denominator is a constant.

    Finite, with a finite gradient, for any denominator but NaN. NaN stays NaN: a broken model must show.
    """
    return (numerator_T - denominator_T.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sums(**columns: Tensor) -> dict[str, float]:
    """Sum of each column in float64, with one transfer from the device for all of them."""
    totals = torch.stack([column.detach().sum(dtype=torch.float64) for column in columns.values()])
    return dict(zip(columns, totals.tolist(), strict=True))
