"""Sums along the tokens of each sequence: positions, discounted returns, running sums, whitening.

Tokens are flat and hold actions only, so returns and GAE carry over tool and user text by construction.
"""

import torch
from torch import Tensor

from asyncrl.algo.group_rewards import GroupRewards

WHITEN_EPS = 1e-8


def positions_T(rewards: GroupRewards) -> Tensor:
    """int64 [T]: 0 for the first action token of each sequence."""
    starts_S = rewards.lengths_S.cumsum(0) - rewards.lengths_S
    return torch.arange(rewards.tokens, device=rewards.sequence_T.device) - starts_S[rewards.sequence_T]


def rewards_T(rewards: GroupRewards) -> Tensor:
    """float64 [T]: the sequence's reward at its last action token, plus the rewards of single tokens."""
    is_last_T = from_end_T(rewards) == 0
    token_rewards_T = 0.0 if rewards.token_rewards_T is None else rewards.token_rewards_T.double()
    return torch.where(is_last_T, rewards.rewards_S.double()[rewards.sequence_T], 0.0) + token_rewards_T


def discounted_returns_T(values_T: Tensor, rewards: GroupRewards, discount: float | Tensor) -> Tensor:
    """[T]: y_t = x_t + discount * y_(t+1) within each sequence; `discount` is one number, or [S]."""
    row_T = from_end_T(rewards)
    longest = int(row_T.max()) + 1 if rewards.tokens else 0
    # One row per distance from the end, so that one vector operation advances all sequences together.
    padded = torch.zeros(longest, rewards.num_sequences, dtype=values_T.dtype, device=values_T.device)
    padded[row_T, rewards.sequence_T] = values_T
    for row in range(1, longest):
        padded[row] += discount * padded[row - 1]
    return padded[row_T, rewards.sequence_T]


def next_T(values_T: Tensor, rewards: GroupRewards) -> Tensor:
    """[T]: the value of the next token of the sequence, 0 after the last."""
    return torch.where(from_end_T(rewards) == 0, 0.0, values_T.roll(-1))


def running_sum_T(values_T: Tensor, rewards: GroupRewards) -> Tensor:
    """[T]: sum of the values from the first token of the sequence up to each token."""
    through_T = values_T.cumsum(0)
    first_T = torch.arange(rewards.tokens, device=values_T.device) - positions_T(rewards)
    return through_T - (through_T - values_T)[first_T]


def whiten(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), unbiased variance; a single value becomes 0."""
    if values.numel() == 0:
        return values
    centred = values - values.mean()
    return centred * torch.rsqrt(centred.square().sum() / max(values.numel() - 1, 1) + WHITEN_EPS)


def from_end_T(rewards: GroupRewards) -> Tensor:
    """int64 [T]: 0 for the last action token of each sequence."""
    return rewards.lengths_S[rewards.sequence_T] - 1 - positions_T(rewards)
