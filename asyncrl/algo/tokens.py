"""The columns that every estimator and loss works on, and the ratios of their probabilities.

Axes in names:  T action tokens, S sequences (rollouts). All tokens of sequence 0 come before those of 1.
There is no padding and no mask: prompt, tool and user tokens are not among them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from asyncrl.algo.ranges import Level
from asyncrl.errors import ShapeError

# exp(20) = 4.9e8 squares and sums in float32 without overflow; a ratio that far out carries no information.
LOG_RATIO_BOUND = 20.0
PROBABILITY_EPS = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Action tokens of one micro-batch or one whole batch."""

    sequence_T: Tensor  # int64, 0..S-1, non-decreasing: the sequence of each token
    num_sequences: int  # S; also counts sequences without an action token, which are not in `sequence_T`
    behaviour_logprobs_T: Tensor  # float32, ln mu, recorded by the generator when it sampled the token
    advantages_T: Tensor  # float32, return minus baseline
    # float32, ln pi at the start of the update; while it is None, the behaviour column takes its place.
    proximal_logprobs_T: Tensor | None = None
    reference_logprobs_T: Tensor | None = None  # float32, ln pi_ref; only with a KL penalty
    weights_T: Tensor | None = None  # float32, constant weights behaviour -> proximal; None means 1
    lag_T: Tensor | None = None  # int64, version being trained minus version of the token, in steps
    values_T: Tensor | None = None  # float32, the critic's values behind the advantages
    returns_T: Tensor | None = None  # float32, the critic's training targets
    solved_T: Tensor | None = None  # float32, 1 for a token of an answer to imitate, else 0
    turn_part_T: Tensor | None = None  # float32, index into `metrics.TURNS`, where episodes have turns
    # int64 [S], action tokens of each sequence's episode in the step, on all ranks. None: each has its own.
    episode_tokens_S: Tensor | None = None
    # [T, ...], what the generator recorded of each token besides: `columns.COLUMNS` has names and data types.
    recorded: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.sequence_T.shape
        columns = {one.name: getattr(self, one.name) for one in fields(self) if one.name.endswith("_T")}
        shapes = {name: column.shape for name, column in columns.items() if column is not None}
        shapes |= {name: column.shape[:1] for name, column in self.recorded.items()}
        for name, shape in shapes.items():
            if shape != size:
                raise ShapeError(
                    f"{name} {list(shape)} must have the shape of sequence_T {list(size)}: one entry "
                    "per action token"
                )

    @property
    def tokens(self) -> int:
        """T, the number of action tokens."""
        return self.sequence_T.numel()

    @property
    def anchor_logprobs_T(self) -> Tensor:
        """[T]: the ratio's denominator: the proximal column if there is one, else the behaviour column."""
        return self.behaviour_logprobs_T if self.proximal_logprobs_T is None else self.proximal_logprobs_T

    @property
    def lengths_S(self) -> Tensor:
        """int64 [S]: number of action tokens of each sequence."""
        # `bincount` would wait for the GPU, a dozen times for each micro-batch.
        return self.sum_S(torch.ones_like(self.sequence_T))

    def sum_S(self, values_T: Tensor) -> Tensor:
        """[S]: sum over the tokens of each sequence, 0 for an empty one."""
        return segment_sum(values_T, self.sequence_T, self.num_sequences)

    def mean_S(self, values_T: Tensor) -> Tensor:
        """[S]: mean over the tokens of each sequence, 0 for an empty one."""
        return self.sum_S(values_T) / self.lengths_S.clamp(min=1)

    def at_level(self, values_T: Tensor, level: Level) -> Tensor:
        """[T]: the values (token), or their sum (sequence) or mean (geometric) over each token's sequence."""
        if level == "token":
            return values_T
        return (self.sum_S if level == "sequence" else self.mean_S)(values_T)[self.sequence_T]

    def episode_mean_S(self, values_T: Tensor) -> Tensor:
        """[S]: the part of each sequence in the mean over its episode's tokens; episodes have several."""
        tokens_S = self.lengths_S if self.episode_tokens_S is None else self.episode_tokens_S
        return self.sum_S(values_T) / tokens_S.clamp(min=1)

    def weighted(self, values_T: Tensor) -> Tensor:
        """[T]: values times the importance weights of the correction."""
        return values_T if self.weights_T is None else values_T * self.weights_T


def segment_sum(values: Tensor, segment: Tensor, count: int) -> Tensor:
    """[count]: sum of the values with each segment index; differentiable.

    The sum is in float64: in float32, 100,000 values of 0.01 have an error of 7e-4, more than GSPO's clip.
    """
    summed = torch.zeros(count, dtype=torch.float64, device=values.device).index_add(
        0, segment, values.double()
    )
    return summed.to(values.dtype)


def log_ratio(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """[T]: ln(numerator / denominator), clamped to +-20; the denominator is a constant.

    Finite, with a finite gradient, for any denominator but NaN. NaN stays NaN and shows a broken model.
    `min` and `clamp` after `exp` would back-propagate 0 * inf = NaN instead.
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
