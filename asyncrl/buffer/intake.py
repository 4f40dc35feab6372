"""How a step gets its groups: take, decode, filter, refill, and enter every id in the ledger."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from asyncrl.algo.staleness import credit_limit
from asyncrl.buffer.base import LearnerBuffer, Take, kind_of
from asyncrl.buffer.judge import (
    DISCARDED_LINEAGE,
    Gate,
    Judge,
    reason_to_reject,
    require_life,
    too_many_rejected,
)
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.watch import StallWatch
from asyncrl.errors import BufferGap
from asyncrl.lineage import INITIAL, History
from asyncrl.types import Group, time_of_day

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Collected:
    """The groups of one step, or those that it has so far."""

    groups: list[Group] = field(default_factory=list)
    # Groups that were consumed but are not trained, with the reason.
    rejected: list[tuple[Group, str]] = field(default_factory=list)
    takes: int = 0
    taken_at: dict[int, float] = field(default_factory=dict)  # Unix seconds by ticket id, of both kinds
    frames: list[bytes] = field(default_factory=list)  # of `groups`, in their order; only on rank 0

    @property
    def results(self) -> list[Group]:
        """All groups but those of lost weights, whose rows another curriculum may have chosen."""
        rejected = (group for group, reason in self.rejected if reason != DISCARDED_LINEAGE)
        return [*self.groups, *rejected]


@dataclass(slots=True, kw_only=True)
class Intake:
    """Collects `groups` accepted groups per step from one lane.

    A rejected group gives its credit back immediately: the limit that generators get grows by one, so that
    refilling never starves. Every id enters the ledger when it is taken.
    """

    buffer: LearnerBuffer
    ledger: Ledger
    gate: Gate
    judge: Judge
    groups: int
    window: int
    max_lag: int
    max_refills: int  # the run ends when a step rejects more than this times `groups`
    stall_s: float
    history: History = INITIAL  # of the weights being trained
    _step: Collected = field(default_factory=Collected)
    _unfit: list[str] = field(default_factory=list)  # reasons of the step's rejections that count as refills
    # The ledger after the last whole step, as in a checkpoint. After a restart, later groups are taken again.
    settled: dict[str, Any] = field(init=False)
    # Groups in the weights of `_version`: the ledger's count before the step that trains this version.
    _version: int = -1
    _trained: int = 0
    # The last id that was issued before this learner came, in this lane's numbers; unknown at first.
    _issued_before: int | None = None
    _stall: StallWatch = field(init=False)
    _ever_fit: bool = False  # whether this learner has taken a group that is not dead

    def __post_init__(self) -> None:
        self.settled = self.ledger.to_dict()
        self._stall = StallWatch(self.buffer, self.stall_s)

    def recover(self, version: int) -> None:
        """Make the store agree with the ledger and open the credit for `version`."""
        self.buffer.recover(self.ledger, version=version, limit=self._limit(version), history=self.history)
        # Later recoveries mend the store: the tickets until then are this learner's own.
        if self._issued_before is None:
            self._issued_before = self.buffer.audit().issued

    def open(self, version: int, *, waiting: bool = False) -> None:
        """Announce the version being trained, and with it the credit; `waiting` as in `set_version`."""
        with self._healing(version):
            self.buffer.set_version(version, limit=self._limit(version), waiting=waiting)

    def poll(self, version: int, *, wait_s: float) -> Collected | None:
        """Return the groups of the step that trains `version`, or None if they are incomplete after `wait_s`.

        Raises RunError if nothing came for `stall_s`, too many groups were rejected, or all taken are dead.
        """
        until_s = time.monotonic() + wait_s
        self._stall.waits_for(version)
        while len(self._step.groups) < self.groups:
            if self._take(version):
                continue
            if time.monotonic() >= until_s:
                self._stall.check(lambda: self.recover(version))
                # Announced again, because generators get no ticket from a store that has lost the limit.
                self.open(version)
                return None
            time.sleep(0.005)
        step = self._step
        self.ledger.trained += len(step.groups)
        self.settled = self.ledger.to_dict()
        self._step, self._unfit = Collected(), []
        return step

    def commit(self, saved: Mapping[str, Any], version: int) -> None:
        """Let the store forget the groups of a checkpoint; `saved` is the ledger in that checkpoint."""
        ledger = Ledger.from_dict(saved)
        with self._healing(version):
            self.buffer.commit(ledger.takes, ledger.chain)

    @contextmanager
    def _healing(self, version: int) -> Iterator[None]:
        """Recover a store that was wiped or rolled back. The ledger in memory is right."""
        try:
            yield
        except BufferGap as gap:
            log.warning(
                "the store forgot part of this run and is brought up to date from the ledger: %s", gap
            )
            self.recover(version)

    def _take(self, version: int) -> bool:
        """Take once. Return whether enough groups were there."""
        with self._healing(version):
            take = self.buffer.take(self.ledger, self.groups - len(self._step.groups), window=self.window)
            if take is not None:
                self._sort(take, version)
            return take is not None
        return False

    def _sort(self, take: Take, version: int) -> None:
        """Accept or reject every group of a take, and enter its ids in the ledger."""
        groups = self.gate.groups(self.buffer, take)
        if groups is None:
            return
        step, unfit = self._step, self._unfit
        self.ledger.consume(take.ids)
        self._stall.progress()
        step.takes += 1
        step.taken_at |= dict.fromkeys((group.ticket_id for group, _ in groups), time_of_day())
        for ticket_id, (group, frame) in zip(take.ids, groups, strict=True):
            reason = reason_to_reject(group, version, judge=self.judge, known_kinds=self.ledger.rejected)
            self._ever_fit = self._ever_fit or group.dead_reason is None
            if reason is None:
                step.groups.append(group)
                step.frames.append(frame)
            else:
                step.rejected.append((group, reason))
                self.ledger.count_rejected(kind_of(reason))
                # Earlier settings may have caused the rejection of earlier tickets; their number is limited.
                if reason != DISCARDED_LINEAGE and ticket_id > (self._issued_before or 0):
                    unfit.append(reason)
        if step.rejected:
            self.open(version)
        if not self._ever_fit:
            require_life(unfit, self.groups)
        if len(unfit) > (most := self.max_refills * self.groups):
            raise too_many_rejected(unfit, step.takes, f"{len(step.groups)} of {self.groups}", most)

    def _limit(self, version: int) -> int:
        if version != self._version:
            self._version, self._trained = version, self.ledger.trained
        rejected = self.ledger.total_rejected
        return credit_limit(self._trained, max_lag=self.max_lag, groups=self.groups, rejected=rejected)
