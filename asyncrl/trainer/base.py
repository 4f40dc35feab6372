"""What the learner loop needs from a trainer: log-probabilities, optimizer steps, weights, checkpoints.

Axes in names:  N tokens of a packed micro-batch (prompts and responses), T its action tokens, S its sequences.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.algo.tokens import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Whole sequences laid end to end, and the flat action tokens the mathematics sees."""

    # int64
    input_ids_N: Tensor
    # int64, restarting at 0 with each sequence
    position_ids_N: Tensor
    # S + 1 offsets into N: cumulative sequence lengths.
    sequence_starts: tuple[int, ...]
    # int64: index in N whose logits predict each action token (the token before it).
    source_T: Tensor
    # int64: the action token ids
    target_T: Tensor
    # Columns of the same T action tokens.
    tokens: TokenBatch


# Name of the one metric that is divided by the counts of the step already; all others are sums over tokens.
LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """What a loss function returns for one micro-batch: sums, to be added up over micro-batches and ranks."""

    # [] differentiable; already divided by the counts of the whole optimizer step.
    loss: Tensor
    # Sums; the learner divides them.
    metrics: Mapping[str, float] = field(default_factory=dict)


# (micro-batch, logprobs_T, entropy_T: float32, both differentiable) -> sums. Never called with an empty
# micro-batch.
LossFunction = Callable[[MicroBatch, Tensor, Tensor], LossSums]

# (micro-batch, values_T: float32, differentiable) -> sums. Never called with an empty micro-batch.
CriticLossFunction = Callable[[MicroBatch, Tensor], LossSums]

# What `Trainer.measure` can measure: policy, the squared probabilities of its whole distribution, reference,
# critic.
COLUMNS = frozenset({"logprobs_T", "sum_squared_probs_T", "reference_logprobs_T", "values_T"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step, summed over micro-batches and ranks."""

    metrics: Mapping[str, float]
    grad_norm: float
    lr: float


class Trainer(Protocol):
    """The policy, and where asked for the reference and the critic, with optimizers and shards.

    Every rank calls every method, in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def measure(self, microbatches: Sequence[MicroBatch], columns: Collection[str]) -> list[dict[str, Tensor]]:
        """The asked `COLUMNS` of each micro-batch's action tokens under the current weights: no gradient, float32 [T].

        `values_T` is the critic's estimate of the return from the token on, before the token is known. Every rank passes the
        same number of micro-batches. Raises RuntimeError for the columns of a model that this trainer was built without.
        """
        ...

    def step(self, microbatches: Sequence[MicroBatch], loss: LossFunction) -> StepResult:
        """One optimizer step on the gradient summed over micro-batches and ranks.

        Every rank passes the same number of micro-batches; an empty one takes part with zero loss. A step without any, or with
        a non-finite loss or gradient, changes nothing on any rank and has the metric `skipped_steps` 1.
        """
        ...

    def critic_step(self, microbatches: Sequence[MicroBatch], loss: CriticLossFunction) -> StepResult:
        """One optimizer step of the critic; otherwise as `step`."""
        ...

    def update_reference(self, decay: float) -> None:
        """reference = decay * reference + (1 - decay) * policy."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities (temperature 1) of token_ids[1:] under the current weights: the probe."""
        ...

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full parameters under their Hugging Face names, one at a time, on rank 0 (gathered; others yield nothing useful)."""
        ...

    def broadcast(self, value: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        ...

    def gather(self, value: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank."""
        ...

    def save(self, directory: Path) -> None:
        """Models, optimizers, schedulers and RNG of all ranks, and a Hugging Face export of the policy in `hf/`.

        Into the existing `directory`. Returns when the files of every rank are there; the caller makes them durable.
        Raises CheckpointError on every rank when any of them could not write.
        """
        ...

    def load(self, directory: Path) -> None:
        """The inverse of `save`. May unpickle: only for directories that have been verified."""
        ...

    def close(self) -> None: ...
