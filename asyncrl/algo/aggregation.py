"""Reduces the losses of tokens [T] to one number: a sum, divided by the counts of the whole optimizer step.

Dividing by the counts over all ranks and micro-batches makes the gradient independent of how the batch was
cut. An episode counts once, also if its conversation has several sequences; `seq-mean-*` is a mean over
episodes. No denominator counts an episode without an action token.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from asyncrl.algo.ranges import Positive
from asyncrl.algo.tokens import TokenBatch


@dataclass(frozen=True, slots=True)
class Counts:
    """Denominators of one optimizer step, over all ranks and micro-batches, before any token is rejected."""

    tokens: int
    sequences: int  # episodes with at least one action token
    solved: int = 0  # tokens of answers to imitate

    @classmethod
    def of(cls, batch: TokenBatch) -> Self:
        """Counts of a whole step, whose sequences are episodes."""
        solved = 0 if batch.solved_T is None else int(batch.solved_T.sum())
        return cls(batch.tokens, int((batch.lengths_S > 0).sum()), solved)


def token_mean(losses_T: Tensor, batch: TokenBatch, counts: Counts) -> Tensor:
    """sum_t L_t / tokens: every token weighs the same. Source: Yu et al. 2025 (arXiv:2503.14476), DAPO."""
    return losses_T.sum() / max(counts.tokens, 1)


def token_sum(losses_T: Tensor, batch: TokenBatch, counts: Counts) -> Tensor:
    """sum_t L_t: the gradient grows with the batch."""
    return losses_T.sum()


def seq_mean_token_sum(losses_T: Tensor, batch: TokenBatch, counts: Counts) -> Tensor:
    """sum_t L_t / sequences: the policy gradient of whole responses."""
    return losses_T.sum() / max(counts.sequences, 1)


def seq_mean_token_mean(losses_T: Tensor, batch: TokenBatch, counts: Counts) -> Tensor:
    """sum_i (mean_t L_it) / sequences: a token of a long answer weighs less.

    Source: Shao et al. 2024 (arXiv:2402.03300), GRPO.
    """
    return batch.episode_mean_S(losses_T).sum() / max(counts.sequences, 1)


def seq_mean_token_sum_norm(
    losses_T: Tensor, batch: TokenBatch, counts: Counts, *, scale: Positive
) -> Tensor:
    """sum_t L_t / (sequences * scale): a constant instead of the length, e.g. the longest response in tokens.

    The scale has no default: the padded width, which others take, would let the layout of a batch set the
    learning rate. Source: Liu et al. 2025 (arXiv:2503.20783), Dr. GRPO.
    """
    return seq_mean_token_sum(losses_T, batch, counts) / scale
