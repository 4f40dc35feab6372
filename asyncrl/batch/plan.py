"""From collected groups to packed micro-batches: samples, advantages, masks, counts. Every rank computes the
same plan.

Axes in names:  T action tokens of the batch before any mask.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.tokens import TokenBatch
from asyncrl.batch.estimate import Estimator
from asyncrl.batch.masks import masked_shares, masks
from asyncrl.batch.measure import measure
from asyncrl.batch.packing import TrainSample, deal, microbatch
from asyncrl.trainer.base import MicroBatch, Trainer
from asyncrl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What the plan depends on, besides the groups."""

    max_lag: int
    mask_stale: bool
    """Whether tokens older than `max_lag` leave the loss. They are mostly tokens of long responses."""
    mask_truncated: bool
    minibatches: int
    tokens_per_microbatch: int
    rank: int
    ranks: int
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimizer step: this rank's micro-batches, and the counts over all ranks that losses are divided
    by."""

    microbatches: tuple[MicroBatch, ...]
    counts: Counts
    tokens: TokenBatch | None = None
    """Tokens of all ranks, where the correction depends on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One batch of groups, ready to train on."""

    minibatches: tuple[Minibatch, ...]
    sequences: tuple[TrainSample, ...]
    """Samples of all ranks, in group order."""
    rewards: GroupRewards
    """Rewards after shaping, as the advantages saw them."""
    returns_T: Tensor | None = None
    """The critic's targets, of masked tokens too; None without a critic."""
    masked: Mapping[str, float] = field(default_factory=dict)
    """Shares of the action tokens that masks took out of the loss, under their published names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Turns groups into samples, and samples with measured columns into a plan."""

    estimator: Estimator
    columns: frozenset[str]
    """Columns that cost a forward pass and are measured before the advantages are made."""
    proximal: bool
    """Whether the measured log-probabilities are those of the proximal policy."""
    over_step: bool = False
    """Whether minibatches carry the tokens of all ranks."""
    settings: PlanSettings

    def assemble(self, groups: Sequence[Group], version: int) -> tuple[TrainSample, ...]:
        """One sample per rollout: every action token, no advantage and no mask yet."""
        return tuple(
            TrainSample(
                prompt_ids=rollout.prompt_ids,
                response_ids=rollout.response_ids,
                keep=rollout.action_mask,
                behaviour_logprobs=rollout.behaviour_logprobs,
                advantages=np.zeros(len(rollout.response_ids), dtype=np.float32),
                lag=version - rollout.versions,
            )
            for group in groups
            for rollout in group.rollouts
        )

    def measure(self, trainer: Trainer, samples: Sequence[TrainSample]) -> dict[str, Tensor]:
        """Flat columns [T] of the whole batch, on every rank."""
        budget_tokens, device = self.settings.tokens_per_microbatch, self.settings.device
        return measure(trainer, samples, self.columns, budget_tokens=budget_tokens, device=device)

    def plan(
        self,
        groups: Sequence[Group],
        samples: Sequence[TrainSample],
        measured: Mapping[str, Tensor],
        kl_coefficient: float,
    ) -> Plan:
        """Advantages over whole groups first, then masks, then packing: a masked token still counts for the
        baseline."""
        estimates = self.estimator.estimate(groups, measured, kl_coefficient)
        columns_T = {
            "advantages_T": estimates.advantages_T,
            "returns_T": estimates.returns_T,
            "values_T": estimates.rewards.values_T,
            "reference_logprobs_T": measured.get("reference_logprobs_T"),
            "proximal_logprobs_T": measured["logprobs_T"] if self.proximal else None,
        }
        present = {name: column_T.numpy() for name, column_T in columns_T.items() if column_T is not None}
        max_lag = self.settings.max_lag if self.settings.mask_stale else None
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        masked = [
            masks(rollout, sample, max_lag=max_lag, truncated=self.settings.mask_truncated)
            for rollout, sample in zip(rollouts, samples, strict=True)
        ]
        planned = tuple(
            replace(
                sample, keep=sample.keep & ~mask.any, advantages=columns.pop("advantages_T"), columns=columns
            )
            for sample, mask, columns in zip(samples, masked, _split(present, samples), strict=True)
        )
        per_minibatch = len(groups) // self.settings.minibatches
        bounds = np.cumsum([0] + [len(group.rollouts) for group in groups])[::per_minibatch]
        return Plan(
            minibatches=tuple(
                self._minibatch(planned[start:stop]) for start, stop in itertools.pairwise(bounds)
            ),
            sequences=planned,
            rewards=estimates.rewards,
            returns_T=estimates.returns_T,
            masked=masked_shares(samples, masked, self.estimator.max_response_tokens),
        )

    def _minibatch(self, samples: Sequence[TrainSample]) -> Minibatch:
        settings = self.settings
        bins = deal(samples, settings.tokens_per_microbatch, settings.ranks)[settings.rank]
        kept = [int(sample.keep.sum()) for sample in samples]
        return Minibatch(
            microbatches=tuple(
                microbatch([samples[i] for i in members], settings.device) for members in bins
            ),
            counts=Counts(tokens=sum(kept), sequences=sum(count > 0 for count in kept)),
            tokens=microbatch(samples, settings.device).tokens if self.over_step else None,
        )


def _split(
    columns: Mapping[str, NDArray[np.float32]], samples: Sequence[TrainSample]
) -> list[dict[str, NDArray[np.float32]]]:
    """Each sample's part of the flat columns, spread over its response; 0 where a token is no action."""
    ends = np.cumsum([sample.keep.sum() for sample in samples])
    parts = [
        {name: np.zeros(len(sample.response_ids), dtype=np.float32) for name in columns} for sample in samples
    ]
    for sample, part, end in zip(samples, parts, ends, strict=True):
        for name, column_T in columns.items():
            part[name][sample.keep] = column_T[end - sample.keep.sum() : end]
    return parts
