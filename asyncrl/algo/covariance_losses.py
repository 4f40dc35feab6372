"""Policy losses that restrain the tokens whose advantage and log-probability covary most.

The covariance (A - mean A)(ln pi - mean ln pi) and the number of restrained tokens are taken over the
micro-batch. So these two losses, and no others, depend on how the batch was cut; give them large
micro-batches. Source: Cui et al. 2025 (arXiv:2505.22617).
"""

import torch
from torch import Tensor

from asyncrl.algo.losses import TokenLoss, clipped_surrogate
from asyncrl.algo.ranges import NonNegative, Share
from asyncrl.algo.ratios import log_ratio, sums
from asyncrl.algo.tokens import TokenBatch


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
    losses_T, metrics = clipped_surrogate(ratio_T, batch.advantages_T, clip_low, clip_high)
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
    logprobs_T = logprobs_T.detach()
    return (batch.advantages_T - batch.advantages_T.mean()) * (logprobs_T - logprobs_T.mean())


def _number(batch: TokenBatch, share: float) -> int:
    return max(int(share * batch.tokens), 1)
