"""Which rows later epochs skip: those that the policy always or never solves. docs/planes/sampling.md.

The learner records the result of every consumed group. It decides each epoch once, from the results of all
tickets up to a fixed distance before the epoch. Its state is a part of the checkpoint.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.algo.ranges import EQUAL, is_solved
from asyncrl.config.schema import Config
from asyncrl.data.sample_plan import Mixture, SamplePlan, make_mixture, rows_of
from asyncrl.errors import DataError
from asyncrl.types import Group

NEVER, MIXED, ALWAYS = -1, 0, 1
# Each order to a generator carries one bit for each row and unfinished epoch: at most 64 KiB for one epoch.
MOST_ROWS = 1 << 19


def verdict(group: Group, solved: float) -> int:
    """Return ALWAYS if every reward is at least `solved`, NEVER if all are equal and below it, else MIXED."""
    rewards = [rollout.reward for rollout in group.rollouts]
    if is_solved(min(rewards), solved):
        return ALWAYS
    return NEVER if max(rewards) - min(rewards) <= EQUAL else MIXED


class Curriculum:
    """The learner's side of one source: results come in, and the skipped rows of each epoch go out.

    Tickets are those of the source, counted from 1.
    """

    def __init__(
        self, plan: SamplePlan, *, solved: float, reach: int, window: int, state: Mapping[str, Any]
    ) -> None:
        """Continue from the `state` of a checkpoint; {} is the beginning. Raises DataError.

        Args:
            plan: gets the skipped rows of every epoch that is decided.
            solved: reward from which an episode counts as solved.
            reach: of the ids above T + R that are issued before the next version is published, unless the
                step rejects very many groups.
            window: W. All ids up to T + R - W are consumed.
            state: what `state` returned.
        """
        if plan.size > MOST_ROWS:
            found = f"a source of data.train has {plan.size} rows"
            text = f"{found}; a curriculum can skip rows of at most {MOST_ROWS}"
            raise DataError(f"{text}; drop data.curriculum, because so many rows are hardly sampled twice")
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

    def record(self, ticket_id: int, group: Group) -> None:
        """Take in the group of a ticket: a trained one, or one that was rejected."""
        if group.rollouts:
            self._results[ticket_id] = self.plan.row(ticket_id), verdict(group, self._solved)

    def decide(self, *, consumed: int, unfinished: int, issued: int) -> dict[str, bytes]:
        """Decide every epoch of which a ticket may be issued before the next version.

        Args:
            consumed: T + R.
            unfinished: the oldest id that is not consumed.
            issued: the last id that may be issued already. Undecided epochs that began by then skip nothing.

        Returns:
            The skipped rows of each epoch from that of `unfinished` on.
        """
        size = self.plan.size
        while (start := self._decided * size) < consumed + self._reach:
            # Results count in the order of their ids.
            for ticket in sorted(one for one in self._results if one <= start - self._distance):
                row, found = self._results.pop(ticket)
                self._verdicts[row] = found
            self._skipped[self._decided] = (self._verdicts != MIXED) & (start >= issued)
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

    def _mask(self, text: str) -> NDArray[np.bool_]:
        return rows_of(base64.b64decode(text), self.plan.size)


def _text(rows: NDArray[np.bool_]) -> str:
    return base64.b64encode(np.packbits(rows).tobytes()).decode()


class Curricula:
    """The curriculum of every source."""

    def __init__(
        self, mixture: Mixture, *, solved: float, reach: int, window: int, state: Mapping[str, Any]
    ) -> None:
        """Continue from the `state` of a checkpoint; {} is the beginning. Arguments as for `Curriculum`."""
        self.mixture, most = mixture, mixture.shares.most
        self._parts = [
            Curriculum(
                plan,
                solved=solved,
                reach=most(source, reach),
                window=most(source, window),
                state=state.get(str(source), {}),
            )
            for source, plan in enumerate(mixture.plans)
        ]

    def record(self, groups: Iterable[Group]) -> None:
        """Take in the groups of a step: trained ones, and those that were rejected."""
        for group in groups:
            source, number = self.mixture.turn(group.ticket_id)
            self._parts[source].record(number, group)

    def decide(self, *, consumed: int, unfinished: int, issued: int) -> dict[str, bytes]:
        """Decide epochs as `Curriculum.decide` does; return their skipped rows, by source and epoch."""
        found: dict[str, bytes] = {}
        count = self.mixture.shares.count
        for source, part in enumerate(self._parts):
            first, last = count(source, unfinished - 1) + 1, count(source, issued)
            decided = part.decide(consumed=count(source, consumed), unfinished=first, issued=last)
            found |= {f"{source}:{epoch}": rows for epoch, rows in decided.items()}
        return found

    def state(self) -> dict[str, Any]:
        """Return plain values for the checkpoint's JSON."""
        return {str(source): part.state() for source, part in enumerate(self._parts)}

    def metrics(self) -> dict[str, float]:
        """Count the rows that the newest epochs skip, by reason."""
        counts = [part.metrics() for part in self._parts]
        return {name: sum(one[name] for one in counts) for name in counts[0]}


def open_curricula(config: Config, sizes: Sequence[int], saved: Mapping[str, Any]) -> Curricula | None:
    """Continue the curricula of sources of so many rows from their `saved` state, if the config has one."""
    if config.data.curriculum.floor is None:
        return None
    groups, lag, refills = config.batch.groups, config.staleness.max_lag, config.algorithm.max_refills
    return Curricula(
        make_mixture(config.data, sizes, seed=config.run.seed),
        solved=config.data.curriculum.solved,
        # A step that rejects raises the credit, and so do groups of lost weights that were under way.
        reach=(lag + 1 + refills + lag + 1) * groups,
        window=config.window_groups,
        state=saved,
    )
