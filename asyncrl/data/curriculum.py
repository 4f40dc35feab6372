"""Which rows later epochs skip: those that the policy always or never solves. docs/planes/sampling.md.

The learner records the result of every consumed group. It decides each epoch once, from the results of all
tickets up to a fixed distance before the epoch. Its state is a part of the checkpoint.
"""

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.sample_plan import SamplePlan
from asyncrl.errors import DataError
from asyncrl.types import Group

NEVER, MIXED, ALWAYS = -1, 0, 1
# Rewards that differ by no more than this are equal.
TOLERANCE = 1e-6
# An order carries one bit for each row, and no value of a message is longer than 64 KiB.
MOST_ROWS = 1 << 19


def verdict(group: Group, solved: float) -> int:
    """Return ALWAYS if every reward is at least `solved`, NEVER if all are equal and below it, else MIXED."""
    rewards = [rollout.reward for rollout in group.rollouts]
    if min(rewards) >= solved:
        return ALWAYS
    return NEVER if max(rewards) - min(rewards) <= TOLERANCE else MIXED


class Curriculum:
    """The learner's side: results come in, and the skipped rows of each epoch go out."""

    def __init__(
        self, plan: SamplePlan, *, solved: float, reach: int, window: int, state: Mapping[str, Any]
    ) -> None:
        """Continue from the `state` of a checkpoint; {} is the beginning. Raises DataError.

        Args:
            plan: gets the skipped rows of every epoch that is decided.
            solved: reward from which an episode counts as solved.
            reach: (L + 1) B + A. No id above T + R + reach is issued before the next version is published.
            window: W. All ids up to T + R - W are consumed.
            state: what `state` returned.
        """
        if plan.size > MOST_ROWS:
            found = f"data.train has {plan.size} rows; a curriculum can skip rows of at most {MOST_ROWS}"
            raise DataError(f"{found}; drop data.curriculum, because so many rows are hardly sampled twice")
        self.plan = plan
        self._solved, self._reach, self._distance = solved, reach, reach + window
        self._verdicts = np.zeros(plan.size, dtype=np.int8)
        self._results: dict[int, tuple[int, int]] = {}  # ticket -> row and verdict; too new to decide with
        self._decided = 0  # epochs
        self._skipped: dict[int, NDArray[np.bool_]] = {}  # unfinished epoch -> rows
        if state:
            self._verdicts += ALWAYS * self._mask(state["always"]) + NEVER * self._mask(state["never"])
            self._results = {ticket: (row, found) for ticket, row, found in state["results"]}
            self._decided = state["decided"]
            self._skipped = {int(epoch): self._mask(rows) for epoch, rows in state["skipped"].items()}
            plan.skip(self._skipped)

    def record(self, groups: Iterable[Group]) -> None:
        """Take in the groups of a step: trained ones, and those that were rejected."""
        for group in groups:
            if group.rollouts:
                row = self.plan.at(group.ticket_id).row
                self._results[group.ticket_id] = row, verdict(group, self._solved)

    def decide(self, *, consumed: int, unfinished: int) -> dict[str, bytes]:
        """Decide every epoch of which a ticket may be issued before the next version.

        Args:
            consumed: T + R.
            unfinished: the oldest id that is not consumed.

        Returns:
            The skipped rows of each epoch from that of `unfinished` on, for `UpdateOrder.skipped`.
        """
        size = self.plan.size
        while (start := self._decided * size) < consumed + self._reach:
            self._settle(start - self._distance)
            self._skipped[self._decided] = self._verdicts != MIXED
            self._decided += 1
        oldest = (unfinished - 1) // size
        self._skipped = {
            epoch: rows for epoch, rows in self._skipped.items() if epoch >= oldest and rows.any()
        }
        self.plan.skip(self._skipped)
        return {str(epoch): np.packbits(rows).tobytes() for epoch, rows in self._skipped.items()}

    def state(self) -> dict[str, Any]:
        """Return plain values for the checkpoint's JSON."""
        return {
            "always": _text(self._verdicts == ALWAYS),
            "never": _text(self._verdicts == NEVER),
            "results": [[ticket, *result] for ticket, result in self._results.items()],
            "decided": self._decided,
            "skipped": {str(epoch): _text(rows) for epoch, rows in self._skipped.items()},
        }

    def metrics(self) -> dict[str, float]:
        """Count the rows that the newest epoch skips, by reason."""
        counts = {"always": ALWAYS, "never": NEVER}
        return {f"curriculum/{name}": int((self._verdicts == kind).sum()) for name, kind in counts.items()}

    def _settle(self, last: int) -> None:
        """Let the results of tickets up to `last` count, in the order of their ids."""
        for ticket in sorted(ticket for ticket in self._results if ticket <= last):
            row, found = self._results.pop(ticket)
            self._verdicts[row] = found

    def _mask(self, text: str) -> NDArray[np.bool_]:
        return rows_of(base64.b64decode(text), self.plan.size)


def rows_of(packed: bytes, size: int) -> NDArray[np.bool_]:
    """Return the mask over `size` rows that `Curriculum.decide` packed."""
    return np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=size).astype(bool)


def _text(rows: NDArray[np.bool_]) -> str:
    return base64.b64encode(np.packbits(rows).tobytes()).decode()
