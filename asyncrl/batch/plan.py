"""Plans a step: groups become samples, advantages, masks and packed micro-batches, equal on every rank.

Axes in names:  T action tokens of the batch before any mask.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.tokens import TokenBatch
from asyncrl.batch.estimate import Estimator
from asyncrl.batch.masks import PlanSettings, masked_shares, masks, measure
from asyncrl.batch.packing import TrainSample, counted, deal, microbatch, per_sample, samples_of
from asyncrl.batch.turn_columns import turn_parts
from asyncrl.trainer.base import MicroBatch, Trainer
from asyncrl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimizer step: this rank's micro-batches, and the counts of all ranks, which divide the losses."""

    microbatches: tuple[MicroBatch, ...]
    counts: Counts
    tokens: TokenBatch | None = None  # of all ranks, if the correction depends on them


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One batch of groups, ready to train on."""

    minibatches: tuple[Minibatch, ...]
    sequences: tuple[TrainSample, ...]  # of all ranks, in group order
    rewards: GroupRewards  # after shaping, as the advantages saw them
    returns_T: Tensor | None = None  # the critic's targets, also of masked tokens; None without a critic
    masked: Mapping[str, float] = field(default_factory=dict)  # shares of tokens that masks took, by metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Turns groups into samples, and samples with measured columns into a plan."""

    estimator: Estimator
    columns: frozenset[str]  # each costs a forward pass, before the advantages are made
    imitates: Callable[[Tensor], Tensor] | None = None  # of rewards, whether an answer is; None if none is
    proximal: bool  # whether the measured log-probabilities are those of the proximal policy
    over_step: bool = False  # whether minibatches carry the tokens of all ranks
    settings: PlanSettings

    def assemble(self, groups: Sequence[Group], version: int) -> tuple[TrainSample, ...]:
        return samples_of(groups, version, self.settings.images)

    def measure(self, trainer: Trainer, samples: Sequence[TrainSample]) -> dict[str, Tensor]:
        return measure(trainer, samples, self.columns, self.settings)

    def plan(
        self,
        groups: Sequence[Group],
        samples: Sequence[TrainSample],
        measured: Mapping[str, Tensor],
        kl_coefficient: float,
    ) -> Plan:
        """Make the advantages of whole groups, then mask, then pack: a masked token counts for baselines."""
        rewards, advantages_T, returns_T = self.estimator.estimate(groups, measured, kl_coefficient)
        columns_T = {
            "returns_T": returns_T,
            "values_T": rewards.values_T,
            "reference_logprobs_T": measured.get("reference_logprobs_T"),
            "proximal_logprobs_T": measured["logprobs_T"] if self.proximal else None,
            "solved_T": rewards.per_token(self.imitates(rewards.rewards_S)) if self.imitates else None,
            "turn_part_T": (turn_part_T := turn_parts(rewards)),
        }
        columns = {name: per_sample(one_T, samples) for name, one_T in columns_T.items() if one_T is not None}
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        masked = [masks(*pair, self.settings) for pair in zip(rollouts, samples, strict=True)]
        planned = tuple(
            replace(
                sample,
                keep=sample.keep & ~(stale | truncated),
                advantages=advantages,
                columns={name: parts[index] for name, parts in columns.items()},
            )
            for index, (sample, (stale, truncated), advantages) in enumerate(
                zip(samples, masked, per_sample(advantages_T, samples), strict=True)
            )
        )
        size = len(groups) // self.settings.minibatches
        starts = np.cumsum([0] + [len(group.rollouts) for group in groups])
        return Plan(
            minibatches=tuple(
                self._minibatch(groups[g : g + size], planned[starts[g] : starts[g + size]])
                for g in range(0, size * self.settings.minibatches, size)
            ),
            sequences=planned,
            rewards=rewards,
            returns_T=returns_T,
            masked=masked_shares(samples, masked, self.estimator.max_response_tokens, turn_part_T),
        )

    def _minibatch(self, groups: Sequence[Group], samples: Sequence[TrainSample]) -> Minibatch:
        settings = self.settings
        rollouts = [len(episode) for group in groups for episode in group.by_episode]
        samples, counts = counted(samples, rollouts)
        bins = deal(samples, settings.tokens_per_microbatch, settings.shares)[settings.share]
        return Minibatch(
            microbatches=tuple(
                microbatch([samples[i] for i in members], settings.device, settings.images)
                for members in bins
            ),
            counts=counts,
            tokens=microbatch(samples, settings.device).tokens if self.over_step else None,
        )
