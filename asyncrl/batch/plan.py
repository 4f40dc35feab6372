"""From collected groups to packed micro-batches: sequences, advantages, masks, counts. Every rank computes the same plan.

Axes in names:  T action tokens of the batch before any mask.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.tokens import TokenBatch
from asyncrl.batch.estimate import Estimator
from asyncrl.batch.masks import Masks, masked_shares, masks
from asyncrl.batch.measure import measure
from asyncrl.batch.packing import TrainSample, deal, microbatch
from asyncrl.trainer.base import MicroBatch, Trainer
from asyncrl.types import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What the plan depends on."""

    max_lag: int
    mask_stale: bool
    """True: tokens older than `max_lag` leave the loss, which takes from long answers."""
    mask_truncated: bool
    minibatches: int
    tokens_per_microbatch: int
    rank: int
    ranks: int
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimizer step: this rank's micro-batches, and the counts over all ranks that losses are divided by."""

    microbatches: tuple[MicroBatch, ...]
    counts: Counts
    tokens: TokenBatch | None = None
    """Those of all ranks, where the correction depends on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One batch of groups, ready to train on."""

    minibatches: tuple[Minibatch, ...]
    sequences: tuple[TrainSample, ...]
    """Of all ranks, in group order."""
    rewards: GroupRewards
    """Shaped, as the advantages saw them."""
    returns_T: Tensor | None = None
    """What the critic is trained on, of masked tokens too; None without one."""
    masked: Mapping[str, float] = field(default_factory=dict)
    """Shares of the action tokens that masks took out of the loss, under their published names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Groups to sequences, sequences to measured columns, all of them to a plan."""

    estimator: Estimator
    columns: frozenset[str]
    """What is measured before the advantages are made."""
    proximal: bool
    """True: the measured log-probabilities are those of the proximal policy."""
    over_step: bool = False
    """True: minibatches bring the tokens of all ranks."""
    settings: PlanSettings

    def assemble(self, groups: Sequence[Group], version: int) -> tuple[TrainSample, ...]:
        """The batch as the trainer sees it: every action token, no advantage yet and no mask."""
        return tuple(
            TrainSample(
                prompt_ids=rollout.prompt_ids,
                response_ids=rollout.response_ids,
                keep=rollout.action_mask,
                behaviour_logprobs=rollout.behaviour_logprobs,
                advantages=np.zeros(len(rollout.response_ids), dtype=np.float32),
                lag=version - rollout.versions,
            )
            for rollout in _rollouts(groups)
        )

    def measure(self, trainer: Trainer, sequences: Sequence[TrainSample]) -> dict[str, Tensor]:
        """Flat columns [T] of the whole batch, on every rank."""
        budget_tokens, device = self.settings.tokens_per_microbatch, self.settings.device
        return measure(trainer, sequences, self.columns, budget_tokens=budget_tokens, device=device)

    def plan(
        self,
        groups: Sequence[Group],
        sequences: Sequence[TrainSample],
        measured: Mapping[str, Tensor],
        kl_coefficient: float,
    ) -> Plan:
        """Advantages over whole groups first, then masks, then packing: a masked token still counts for the baseline."""
        estimates = self.estimator.estimate(groups, measured, kl_coefficient)
        made = {
            "advantages_T": estimates.advantages_T,
            "returns_T": estimates.returns_T,
            "values_T": estimates.rewards.values_T,
            "reference_logprobs_T": measured.get("reference_logprobs_T"),
            "proximal_logprobs_T": measured["logprobs_T"] if self.proximal else None,
        }
        present = {name: column_T.numpy() for name, column_T in made.items() if column_T is not None}
        masked = [self._masks(*pair) for pair in zip(_rollouts(groups), sequences, strict=True)]
        planned = tuple(
            replace(sequence, keep=sequence.keep & ~mask.any, advantages=columns.pop("advantages_T"), columns=columns)
            for sequence, mask, columns in zip(sequences, masked, _split(present, sequences), strict=True)
        )
        return Plan(
            minibatches=self._minibatches(groups, planned),
            sequences=planned,
            rewards=estimates.rewards,
            returns_T=estimates.returns_T,
            masked=masked_shares(sequences, masked, self.estimator.max_response_tokens),
        )

    def _masks(self, rollout: Rollout, sequence: TrainSample) -> Masks:
        max_lag = self.settings.max_lag if self.settings.mask_stale else None
        return masks(rollout, sequence, max_lag=max_lag, truncated=self.settings.mask_truncated)

    def _minibatches(self, groups: Sequence[Group], sequences: Sequence[TrainSample]) -> tuple[Minibatch, ...]:
        per_minibatch = len(groups) // self.settings.minibatches
        bounds = np.cumsum([0] + [len(group.rollouts) for group in groups])[::per_minibatch]
        return tuple(self._minibatch(sequences[start:stop]) for start, stop in itertools.pairwise(bounds))

    def _minibatch(self, sequences: Sequence[TrainSample]) -> Minibatch:
        settings = self.settings
        bins = deal(sequences, settings.tokens_per_microbatch, settings.ranks)[settings.rank]
        kept = [int(sequence.keep.sum()) for sequence in sequences]
        return Minibatch(
            microbatches=tuple(microbatch([sequences[i] for i in members], settings.device) for members in bins),
            counts=Counts(tokens=sum(kept), sequences=sum(count > 0 for count in kept)),
            tokens=microbatch(sequences, settings.device).tokens if self.over_step else None,
        )


def _rollouts(groups: Sequence[Group]) -> Iterator[Rollout]:
    return (rollout for group in groups for rollout in group.rollouts)


def _split(
    columns: Mapping[str, NDArray[np.float32]], sequences: Sequence[TrainSample]
) -> Iterator[dict[str, NDArray[np.float32]]]:
    """Each sequence's part of flat columns, spread over its response: 0 where it is no action."""
    start = 0
    for sequence in sequences:
        stop = start + int(sequence.keep.sum())
        parts = {name: np.zeros(len(sequence.response_ids), dtype=np.float32) for name in columns}
        for name, part in parts.items():
            part[sequence.keep] = columns[name][start:stop]
        start = stop
        yield parts
