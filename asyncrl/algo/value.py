"""The critic's loss per token, aggregated like a policy loss, and its explained variance."""

import torch
from torch import Tensor

from asyncrl.algo.losses import TokenLoss
from asyncrl.algo.ranges import Positive
from asyncrl.algo.tokens import sums


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
