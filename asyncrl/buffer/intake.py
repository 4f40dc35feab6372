"""How one optimizer step gets its groups: take, decode, filter, refill, and book every id in the ledger."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.algo.staleness import credit_limit
from asyncrl.buffer.base import LearnerBuffer, Take, kind_of
from asyncrl.buffer.gate import Gate
from asyncrl.buffer.judge import DISCARDED_LINEAGE, Judge, reason_to_reject, too_many_rejected
from asyncrl.buffer.ledger import Ledger
from asyncrl.errors import BufferGap, RunError
from asyncrl.lineage import INITIAL, History
from asyncrl.types import Group, time_of_day

log = logging.getLogger(__name__)

# After this silence the store is made to agree with the ledger: somebody may have written into it by hand, so that
# no generator gets the missing tickets.
REPAIR_AFTER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What one optimizer step trains on."""

    groups: tuple[Group, ...]
    rejected: tuple[tuple[Group, str], ...]
    """Groups that were consumed on the way but are not trained, with the reason."""
    takes: int
    taken_at: Mapping[int, float] = field(default_factory=dict)
    """Unix seconds by ticket id, of both kinds."""


@dataclass(slots=True)
class _Step:
    """What the step under way has so far."""

    accepted: list[Group] = field(default_factory=list)
    rejected: list[tuple[Group, str]] = field(default_factory=list)
    unfit: Counter[str] = field(default_factory=Counter)
    """Rejections that count against `max_refills`, by kind."""
    takes: int = 0
    taken_at: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Intake:
    """Collects `groups` accepted groups per step from one lane.

    A rejected group gives its credit back immediately: the limit announced to the generators grows by one for
    each, so that refilling can never starve. Every id enters the ledger when it is taken.
    """

    buffer: LearnerBuffer
    ledger: Ledger
    gate: Gate
    judge: Judge
    groups: int
    window: int
    max_lag: int
    max_refills: int
    stall_s: float
    history: History = INITIAL
    """History of the weights being trained."""
    name_of: Callable[[int], int] = int
    """Maps an id of `buffer` to the ticket id that the rest of the program uses."""
    _step: _Step = field(default_factory=_Step)
    _settled: dict[str, Any] = field(init=False)
    _version: int = -1
    """The version that `_trained` belongs to."""
    _trained: int = 0
    """Groups in the weights of `_version`; the ledger counts those of a step as soon as the step has them."""
    _issued_before: int = 0
    """The last id that was issued before this learner recovered the store."""
    _arrived: int = 0
    """Groups that the store had counted when the last check for a stall was made."""
    _waiting_for: int = -1
    _last_progress_s: float = field(default_factory=time.monotonic)
    _repaired_at_s: float = -math.inf

    def __post_init__(self) -> None:
        self._settled = self.ledger.to_dict()

    @property
    def settled(self) -> Ledger:
        """The ledger after the last whole step: what is only half collected is taken again after a restart."""
        return Ledger.from_dict(self._settled)

    def recover(self, version: int) -> None:
        """Make the store agree with the ledger and open the credit for `version`."""
        self.buffer.recover(self.ledger, version=version, limit=self._limit(version), history=self.history)
        self._issued_before = self.buffer.audit().issued

    def open(self, version: int, *, waiting: bool = False) -> None:
        """Announce the version being trained, and with it the credit; `waiting` as in `set_version`."""
        try:
            self.buffer.set_version(version, limit=self._limit(version), waiting=waiting)
        except BufferGap as gap:
            self._heal(gap, version)

    def poll(self, version: int, *, wait_s: float) -> Collected | None:
        """The groups of the step that trains `version`, or None when they are not there after `wait_s`.

        Raises:
            RunError: nothing arrived for `stall_s`, or the filters rejected `max_refills` batches' worth of groups.
        """
        until_s = time.monotonic() + wait_s
        if version != self._waiting_for:  # until now the learner was busy with the previous step
            self._waiting_for, self._last_progress_s = version, time.monotonic()
        while len(self._step.accepted) < self.groups:
            if self._take(version):
                continue
            if time.monotonic() >= until_s:
                self._check_stall(version)
                self.open(version)  # a store that lost only this would wait for the learner, and the learner for it
                return None
            time.sleep(0.005)
        return self._finish()

    def commit(self, takes: int, chain: str, version: int) -> None:
        """Let the store forget the groups up to take `takes`: a checkpoint holds them."""
        try:
            self.buffer.commit(takes, chain)
        except BufferGap as gap:
            self._heal(gap, version)

    def _take(self, version: int) -> bool:
        """One take, if enough groups are there."""
        try:
            take = self.buffer.take(self.ledger, self.groups - len(self._step.accepted), window=self.window)
            if take is not None:
                self._sort(take, version)
        except BufferGap as gap:
            self._heal(gap, version)
            return False
        return take is not None

    def _heal(self, gap: BufferGap, version: int) -> None:
        """The store was wiped or rolled back under a live learner: the ledger in memory wins."""
        log.warning("the store forgot part of this run and is brought up to date from the ledger: %s", gap)
        self.recover(version)

    def _sort(self, take: Take, version: int) -> None:
        """Accept or reject every group of a take, and book its ids."""
        groups = self.gate.groups(self.buffer, take, self.name_of)
        if groups is None:
            return
        step = self._step
        self.ledger.consume(take.ids)
        self._last_progress_s = time.monotonic()
        step.takes += 1
        step.taken_at |= dict.fromkeys(map(self.name_of, take.ids), time_of_day())
        for ticket_id, group in zip(take.ids, groups, strict=True):
            reason = reason_to_reject(group, version, judge=self.judge, known_kinds=self.ledger.rejected)
            if reason is None:
                step.accepted.append(group)
            else:
                step.rejected.append((group, reason))
                self.ledger.count_rejected(kind := kind_of(reason))
                # Today's filters and settings are not to blame for groups that were issued before them; and there
                # is a limited number of those.
                if reason != DISCARDED_LINEAGE and ticket_id > self._issued_before:
                    step.unfit[kind] += 1
        if step.rejected:
            self.open(version)
        most = self.max_refills * self.groups
        if step.unfit.total() > most:
            raise too_many_rejected(step.unfit, step.rejected, step.takes, f"{len(step.accepted)} of {self.groups}", most)

    def _finish(self) -> Collected:
        step = self._step
        self.ledger.trained += len(step.accepted)
        self._settled = self.ledger.to_dict()
        self._step = _Step()
        return Collected(groups=tuple(step.accepted), rejected=tuple(step.rejected), takes=step.takes, taken_at=step.taken_at)

    def _check_stall(self, version: int) -> None:
        arrived = self.buffer.audit().counters.get("put", 0)
        if arrived != self._arrived:
            self._arrived, self._last_progress_s = arrived, time.monotonic()
        silent_s = time.monotonic() - self._last_progress_s
        if silent_s > min(REPAIR_AFTER_S, self.stall_s / 2) and self._repaired_at_s < self._last_progress_s:
            log.info("no group arrived for %.0f s; the store is made to agree with the ledger, should it be to blame", silent_s)
            self._repaired_at_s = time.monotonic()
            self.recover(version)
        if silent_s > self.stall_s:
            raise RunError(
                f"no group arrived for {silent_s:.0f} s (control.stall_s is {self.stall_s:.0f}); "
                "look at the generators' logs, or start generators with `asyncrl generator`"
            )

    def _limit(self, version: int) -> int:
        if version != self._version:  # what the ledger has by now is in the weights of this version
            self._version, self._trained = version, self.ledger.trained
        rejected = self.ledger.total_rejected
        return credit_limit(self._trained, max_lag=self.max_lag, groups=self.groups, rejected=rejected)
