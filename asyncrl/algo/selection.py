"""Selects the tokens that a policy loss trains. The others still count in the denominators."""

import torch
from torch import Tensor

from asyncrl.algo.ratios import log_ratio
from asyncrl.algo.tokens import TokenBatch
from asyncrl.errors import ConfigError

SHARE_SLACK = 1e-9


def select(
    batch: TokenBatch,
    logprobs_T: Tensor,
    entropy_T: Tensor | None,
    *,
    max_drift: float | None,
    top_entropy: float,
) -> Tensor | None:
    """bool [T]: the tokens to train, or None for all. Raises ConfigError if entropies are missing."""
    keep_T = None if max_drift is None else within_drift(batch, logprobs_T, max_drift)
    if top_entropy < 1.0:
        if entropy_T is None:
            raise ConfigError(f"top_entropy is {top_entropy}, but no entropies were computed; set it to 1.0")
        high_T = highest_entropy(batch, entropy_T, top_entropy)
        keep_T = high_T if keep_T is None else keep_T & high_T
    return keep_T


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
