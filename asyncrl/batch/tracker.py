"""What rows are expected to be rewarded with, by the batches before: the baseline of the advantage `spo`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from asyncrl.algo.group_rewards import GroupRewards

RowOf = Callable[[int], int]  # from a ticket's id


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
