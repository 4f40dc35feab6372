"""What is steered after each step in the same way on every rank: coefficients, and what rows should earn."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.metrics import finish, merge
from asyncrl.config.algorithm import EntropyConfig, KLConfig
from asyncrl.trainer.base import StepResult

RowOf = Callable[[int], int]  # from a ticket's id


class Coefficients:
    """The coefficients of the next step. Only steered ones come from a checkpoint."""

    def __init__(self, kl: KLConfig, entropy: EntropyConfig) -> None:
        self._kl_config, self._entropy_config = kl, entropy
        self.kl = kl.coefficient
        self._bonus = entropy.coefficient
        self._measured = math.inf  # before the first measurement the entropy is not too low

    def resume(self, state: Mapping[str, float]) -> None:
        """Take coefficients that are still steered from the `state()` before a restart."""
        if self._kl_config.target:
            self.kl = state.get("kl", self.kl)
        if self._entropy_config.target:
            self._bonus = min(state.get("entropy", self._bonus), self._entropy_config.maximum)
            self._measured = state.get("measured_entropy", self._measured)

    @property
    def entropy(self) -> float:
        """Return the coefficient of the bonus in the loss; 0 while the entropy is above its target."""
        target = self._entropy_config.target
        return self._bonus if target is None or self._measured <= target else 0.0

    def adapt(self, results: Sequence[StepResult], *, sequences: int) -> None:
        """Steer by the metrics of a step over `sequences` sequences, except by missing or infinite ones."""
        measured = finish(merge(result.metrics for result in results))
        kl_now = measured.get("policy/kl_reference", math.nan)
        entropy_now = measured.get("policy/entropy", math.nan)
        if (target := self._kl_config.target) and math.isfinite(kl_now):
            horizon = self._kl_config.horizon
            self.kl = adapt_coefficient(self.kl, kl_now, target=target, horizon=horizon, steps=sequences)
        if (target := self._entropy_config.target) and math.isfinite(entropy_now):
            step, maximum = self._entropy_config.step, self._entropy_config.maximum
            self._bonus = adapt_bonus(self._bonus, entropy_now, target=target, step=step, maximum=maximum)
            self._measured = entropy_now

    def state(self) -> dict[str, float]:
        """Return the steered coefficients for the checkpoint, as finite numbers."""
        state = {"kl": self.kl} if self._kl_config.target else {}
        if self._entropy_config.target:
            state["entropy"] = self._bonus
            if math.isfinite(self._measured):
                state["measured_entropy"] = self._measured
        return state

    def metrics(self) -> dict[str, float]:
        """Return the coefficients that are in use, under their published names."""
        published = {"policy/kl_coefficient": self.kl} if self._kl_config.coefficient else {}
        if self._entropy_config.coefficient or self._entropy_config.target:
            published["policy/entropy_coefficient"] = self.entropy
        return published


def adapt_coefficient(coefficient: float, kl: float, *, target: float, horizon: float, steps: float) -> float:
    """The next KL coefficient: higher if the measured KL is above its target, by at most 20 % per horizon.

    Args:
        kl: measured over the last `steps`, in nats per token.
        horizon: how many steps a full correction takes; same unit as `steps`, of which more change no more.

    Source: Ziegler et al. 2019 (arXiv:1909.08593). A fixed coefficient needs no function.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * min(steps / horizon, 1.0))


def adapt_bonus(coefficient: float, entropy: float, *, target: float, step: float, maximum: float) -> float:
    """The next coefficient in 0 .. maximum: + `step` if the entropy is below its target, - `step` if above.

    Args:
        entropy: measured, in nats per token; so is `target`.

    Source: Skywork-OR1 2025 (arXiv:2505.22312), adaptive entropy control.
    """
    change = step if entropy < target else -step if entropy > target else 0.0
    return min(max(coefficient + change, 0.0), maximum)


class Tracker:
    """The discounted mean reward of each row. It is equal on every rank, and a part of the checkpoint."""

    def __init__(self, row: RowOf, *, decay: float) -> None:
        """`decay` is what is left of the weight of earlier rewards after each batch with their row."""
        self._row, self._decay = row, decay
        self._found: dict[int, tuple[float, float]] = {}  # row -> sum and number of rewards, both discounted

    def foretold(self, rewards: GroupRewards, tickets: Sequence[int]) -> GroupRewards:
        """Return rewards with the columns `row_S` and `expected_S`; the groups are of these tickets."""
        rows, unknown = [self._row(ticket) for ticket in tickets], _unknown(rewards)
        sums = torch.tensor([self._found.get(row, unknown) for row in rows], dtype=torch.float64)
        row_S, expected_S = (of_G[rewards.group_S] for of_G in (torch.tensor(rows), sums[:, 0] / sums[:, 1]))
        return replace(rewards, row_S=row_S, expected_S=expected_S)

    def record(self, rewards: GroupRewards) -> None:
        """Take in a batch that has been planned. One with a reward that is not finite changes nothing."""
        if not (totals_S := rewards.totals_S).isfinite().all():
            return
        unknown = _unknown(rewards)
        rows, index_S = np.unique(rewards.column("row_S").numpy(), return_inverse=True)
        sums, counts = np.bincount(index_S, totals_S.numpy()), np.bincount(index_S)
        for row, total, count in zip(rows.tolist(), sums.tolist(), counts.tolist(), strict=True):
            before, number = self._found.get(row, unknown)
            self._found[row] = self._decay * before + total, self._decay * number + count

    def state(self) -> dict[str, list[float]]:
        """Return plain values for the checkpoint's JSON, which keeps every bit of them."""
        return {str(row): [*found] for row, found in self._found.items()}

    def resume(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from the `state()` before a restart."""
        self._found = {int(row): (total, number) for row, (total, number) in state.items()}


def _unknown(rewards: GroupRewards) -> tuple[float, float]:
    """A row that was never trained begins with the mean of the batch, as one reward."""
    return float(rewards.totals_S.mean()), 1.0
