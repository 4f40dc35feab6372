"""The interface of a trainer: log-probabilities, optimizer steps, weights, checkpoints.

Axes in names:  N tokens of a packed micro-batch, T its action tokens, S its sequences.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.algo.tokens import TokenBatch
from asyncrl.weights.base import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Whole sequences laid end to end, and the columns of their action tokens."""

    input_ids_N: Tensor  # int64
    position_ids_N: Tensor  # int64, restarting at 0 with each sequence
    sequence_starts: tuple[int, ...]  # S + 1 offsets into N: cumulative sequence lengths
    source_T: Tensor  # int64: the index in N of the token before each action token, whose logits predict it
    target_T: Tensor  # int64: the action token ids
    tokens: TokenBatch  # columns of the same T action tokens
    # int16 [N, layers, top_k]: the experts with which the policy runs each token; -1: those that it chooses.
    experts_NLK: Tensor | None = None
    # int32 [T, K]: the tokens among which each action token was sampled, then -1; None: among all.
    kept_TK: Tensor | None = None
    # What the model's forward pass takes besides, under the names and with the axes that it expects. Its own
    # `position_ids`, of three axes for example, take the place of `position_ids_N`.
    model_inputs: Mapping[str, Tensor] = field(default_factory=dict)


# Name of the only metric that is already divided by the counts of the step; all others are sums over tokens.
LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """The result of a loss function for one micro-batch: sums, which add up over micro-batches and shares."""

    loss: Tensor  # [], differentiable, already divided by the counts of the whole optimizer step
    # Sums, numbers or tensors [], for which nobody waits before the step's end; the learner divides them.
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)


# (micro-batch, logprobs_T, entropy_T) -> sums; both columns float32, differentiable; never an empty one.
LossFunction = Callable[[MicroBatch, Tensor, Tensor], LossSums]

# (micro-batch, values_T) -> sums; values_T float32, differentiable; never an empty micro-batch.
CriticLossFunction = Callable[[MicroBatch, Tensor], LossSums]

# Columns of `Trainer.measure`: two of the policy, one of the reference, one of the critic.
COLUMNS = frozenset({"logprobs_T", "sum_squared_probs_T", "reference_logprobs_T", "values_T"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one optimizer step, summed over micro-batches and shares."""

    metrics: Mapping[str, float]
    grad_norm: float
    lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one rank has used since the last `Trainer.usage`."""

    # Floating-point operations of its models, without repeated ones; None for an unknown architecture.
    flops: int | None = None
    # What its GPU could do; None on a CPU, for an unknown GPU, and in float32.
    peak_flops_per_s: float | None = None
    # On a GPU, the largest `allocated_bytes` and `reserved_bytes` of torch, and the `planned_bytes`.
    memory: Mapping[str, int] = field(default_factory=dict)


class Trainer(Protocol):
    """The policy, and if configured the reference and the critic, with optimizers and shards.

    Log-probabilities, entropies and probabilities are those given that the token is one of its `kept_TK`.
    Every rank calls every method, in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def share(self) -> int:
        """The part of every batch that this rank trains on; ranks that divide sequences have the same."""

    @property
    def shares(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Where micro-batches must be, and where `tensors` are."""

    def measure(
        self, microbatches: Sequence[MicroBatch], columns: Collection[str]
    ) -> list[dict[str, Tensor]]:
        """The requested `COLUMNS` of each micro-batch under the current weights: float32 [T], no gradient.

        `values_T[t]` is the critic's estimate of the return from token t on, given the tokens before t.
        Every rank passes the same number of micro-batches. Raises RuntimeError for a column without a model.
        """

    def step(
        self, microbatches: Sequence[MicroBatch], loss: LossFunction, *, entropy_gradient: bool = True
    ) -> StepResult:
        """One optimizer step on the gradient summed over micro-batches and shares.

        Without `entropy_gradient`, the loss may use `entropy_T` but is not differentiated by it.

        Every rank passes the same number of micro-batches; an empty one has loss 0. Without micro-batches, or
        with a non-finite loss or gradient, nothing changes on any rank and the metric `skipped_steps` is 1.
        """

    def critic_step(self, microbatches: Sequence[MicroBatch], loss: CriticLossFunction) -> StepResult:
        """One optimizer step of the critic; otherwise as `step`."""

    def update_reference(self, decay: float) -> None:
        """reference = decay * reference + (1 - decay) * policy."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The probe: log-probabilities in nats, temperature 1, of all tokens but the first of each sequence.

        They are computed under the current weights as in a step: all sequences in one pack.
        """

    def score_plainly(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The same of the last tokens of each, as transformers alone computes them, without the learner."""

    def specs(self) -> list[TensorSpec]:
        """What is published: the tensors that engines load, under the names that they know."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of `specs`, valid until the next, on rank 0. Every rank must exhaust the iterator."""

    def export(self) -> Callable[[Path], None]:
        """Copy the policy to host memory, and return what writes it as a new Hugging Face directory.

        Rank 0 alone may call the result, in any thread, while training goes on.
        """

    def usage(self) -> list[Usage]:
        """What each rank has used since the last call, in rank order, on every rank."""

    def broadcast(self, value: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""

    def gather(self, value: bytes) -> list[bytes]:
        """The bytes of each share, in their order, on every rank."""

    def save(self, directory: Path) -> None:
        """Write what `load` needs: models, optimizers, schedulers and RNG of all ranks.

        `directory` must exist. Every rank's files are written on return; the caller makes them durable.
        Raises CheckpointError on every rank if one of them could not write.
        """

    def load(self, directory: Path) -> None:
        """The inverse of `save`. It may unpickle, so the caller must have verified the directory."""

    def close(self) -> None: ...
