"""The input of advantage estimators, and the arithmetic they share: of groups, and along each sequence.

Axes in names:  T action tokens, S sequences (rollouts), K turns, G groups (prompts).
Rewards are summed and centred in float64, because a variance is a small difference of large numbers.
Tokens are flat and hold actions only, so returns and GAE carry over tool and user text by construction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from asyncrl.algo.tokens import segment_sum
from asyncrl.errors import ConfigError, ShapeError

WHITEN_EPS = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """Rewards of a batch of whole groups, plus optional columns that single estimators need."""

    rewards_S: Tensor  # float32, shaped reward of each sequence
    group_S: Tensor  # int64, 0..G-1, non-decreasing: the group of each sequence
    num_groups: int
    lengths_S: Tensor  # int64, number of action tokens of each sequence
    sequence_T: Tensor  # int64, non-decreasing: the sequence of each action token
    # Parts of the reward, each [S], NaN where a sequence lacks the part; used by gdpo.
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    token_rewards_T: Tensor | None = None  # added to `rewards_S`, e.g. minus the KL penalty
    values_T: Tensor | None = None  # the critic's values; used by gae
    greedy_rewards_group: Tensor | None = None  # [G], of the greedy response to each prompt; used by remax
    truncated_S: Tensor | None = None  # bool, responses cut off at the length limit; used by gae
    behaviour_logprobs_T: Tensor | None = None  # ln mu of the generator; used by optimal_token_baseline
    logprobs_T: Tensor | None = None  # ln pi at the start of the update; used by optimal_token_baseline
    reference_logprobs_T: Tensor | None = None  # ln pi of the reference; used by the module `preferences`
    row_S: Tensor | None = None  # int64, the row of data.train that each sequence answers
    expected_S: Tensor | None = None  # float64, reward of the row by earlier batches; used by spo
    # Sum of squared probabilities over the vocabulary; used by optimal_token_baseline.
    sum_squared_probs_T: Tensor | None = None
    # The turns of all sequences, in the order of the tokens; used by the module `turn_advantages`.
    episode_K: Tensor | None = None  # int64, non-decreasing: the sequence of each turn
    turn_T: Tensor | None = None  # int64, 0..K-1, non-decreasing: the turn of each action token
    turn_rewards_K: Tensor | None = None  # float32, part of `rewards_S` that the environment gave the turn
    turn_states_K: Tensor | None = None  # int64, the state in which the turn began; 0 if it has none

    def __post_init__(self) -> None:
        turns = (0,) if self.episode_K is None else self.episode_K.shape
        groups = (self.num_groups,)
        shapes = {"T": self.sequence_T.shape, "S": self.rewards_S.shape, "K": turns, "group": groups}
        # The end of a column's name is its axis.
        columns = [(one.name, one.name.rpartition("_")[2], getattr(self, one.name)) for one in fields(self)]
        columns += [(f"parts[{name!r}]", "S", part) for name, part in self.parts.items()]
        for name, axis, column in columns:
            if axis in shapes and column is not None and column.shape != shapes[axis]:
                raise ShapeError(f"{name} {list(column.shape)} must have the shape {list(shapes[axis])}")

    def column(self, name: str) -> Tensor:
        """Return an optional column. Raises ConfigError if this run does not have it."""
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise ConfigError(
                f"this advantage needs {name}, which this run does not compute; choose another advantage"
            )
        return column

    @property
    def tokens(self) -> int:
        """T, the number of action tokens."""
        return self.sequence_T.numel()

    @property
    def num_sequences(self) -> int:
        """S, the number of sequences."""
        return self.rewards_S.numel()

    @property
    def totals_S(self) -> Tensor:
        """float64 [S]: reward of each sequence plus the rewards of its tokens."""
        if self.token_rewards_T is None:
            return self.rewards_S.double()
        token_rewards_T = self.token_rewards_T.double()
        return self.rewards_S.double() + segment_sum(token_rewards_T, self.sequence_T, self.num_sequences)

    @property
    def sizes_S(self) -> Tensor:
        """int64 [S]: size of each sequence's group."""
        return torch.bincount(self.group_S, minlength=self.num_groups)[self.group_S]

    def group_sum_S(self, values_S: Tensor) -> Tensor:
        """[S]: sum over the group, for each of its sequences."""
        return segment_sum(values_S, self.group_S, self.num_groups)[self.group_S]

    def group_max_S(self, values_S: Tensor) -> Tensor:
        """[S]: maximum over the group, for each of its sequences."""
        lowest_G = torch.full((self.num_groups,), -torch.inf, dtype=values_S.dtype, device=values_S.device)
        return lowest_G.scatter_reduce(0, self.group_S, values_S, "amax")[self.group_S]

    def centred_S(self, values_S: Tensor, weights_S: Tensor | None = None) -> Tensor:
        """[S]: values minus the (weighted) mean of their group.

        Exactly 0 where all values of a group are equal: the float64 sum of equal float32 numbers is exact.
        """
        weights_S = torch.ones_like(values_S) if weights_S is None else weights_S
        return values_S - self.group_sum_S(weights_S * values_S) / self.group_sum_S(weights_S)

    def group_std_S(self, values_S: Tensor, *, ddof: int, weights_S: Tensor | None = None) -> Tensor:
        """[S]: standard deviation of the group, among those with a weight of 1; 0 for a group of one."""
        weights_S = torch.ones_like(values_S) if weights_S is None else weights_S
        squares_S = weights_S * self.centred_S(values_S, weights_S).square()
        variance_S = self.group_sum_S(squares_S) / (self.group_sum_S(weights_S) - ddof).clamp(min=1)
        return variance_S.sqrt()

    def per_token(self, values_S: Tensor) -> Tensor:
        """float32 [T]: each token gets the value of its sequence."""
        return values_S[self.sequence_T].float()

    def compared_T(self, values_T: Tensor) -> Tensor:
        """float32 [T]: the values, but 0 in a group of one, which is compared with nothing."""
        return torch.where((self.sizes_S > 1)[self.sequence_T], values_T, 0.0).float()

    @property
    def positions_T(self) -> Tensor:
        """int64 [T]: 0 for the first action token of each sequence."""
        starts_S = self.lengths_S.cumsum(0) - self.lengths_S
        return torch.arange(self.tokens, device=self.sequence_T.device) - starts_S[self.sequence_T]

    @property
    def rewards_T(self) -> Tensor:
        """float64 [T]: the sequence's reward at its last action token, plus the rewards of single tokens."""
        is_last_T = self.from_end_T == 0
        token_rewards_T = 0.0 if self.token_rewards_T is None else self.token_rewards_T.double()
        return torch.where(is_last_T, self.rewards_S.double()[self.sequence_T], 0.0) + token_rewards_T

    def discounted_returns_T(self, values_T: Tensor, discount: float | Tensor) -> Tensor:
        """[T]: y_t = x_t + discount * y_(t+1) within each sequence; `discount` is one number, or [S]."""
        row_T = self.from_end_T
        longest = int(row_T.max()) + 1 if self.tokens else 0
        # One row per distance from the end, so that one vector operation advances all sequences together.
        padded = torch.zeros(longest, self.num_sequences, dtype=values_T.dtype, device=values_T.device)
        padded[row_T, self.sequence_T] = values_T
        for row in range(1, longest):
            padded[row] += discount * padded[row - 1]
        return padded[row_T, self.sequence_T]

    def next_T(self, values_T: Tensor) -> Tensor:
        """[T]: the value of the next token of the sequence, 0 after the last."""
        return torch.where(self.from_end_T == 0, 0.0, values_T.roll(-1))

    def running_sum_T(self, values_T: Tensor) -> Tensor:
        """[T]: sum of the values from the first token of the sequence up to each token."""
        through_T = values_T.cumsum(0)
        first_T = torch.arange(self.tokens, device=values_T.device) - self.positions_T
        return through_T - (through_T - values_T)[first_T]

    @property
    def from_end_T(self) -> Tensor:
        """int64 [T]: 0 for the last action token of each sequence."""
        return self.lengths_S[self.sequence_T] - 1 - self.positions_T


def whiten(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), unbiased variance; a single value becomes 0."""
    if values.numel() == 0:
        return values
    centred = values - values.mean()
    return centred * torch.rsqrt(centred.square().sum() / max(values.numel() - 1, 1) + WHITEN_EPS)
