"""How one optimizer step gets its groups: take, decode, filter, refill, and book every id in the ledger."""

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.algo.filters import GroupOutcome
from asyncrl.algo.staleness import credit_limit
from asyncrl.algo.trainable import UNTRAINABLE
from asyncrl.buffer.base import DEADLY, LearnerBuffer, Take, kind_of, one_line
from asyncrl.buffer.gate import DEAD, Gate
from asyncrl.buffer.ledger import Ledger
from asyncrl.errors import BufferGap, RunError
from asyncrl.types import INITIAL, Group, History, time_of_day

log = logging.getLogger(__name__)

DISCARDED_LINEAGE = "discarded_lineage"
"""Reason of groups sampled by weights that the learner lost."""

MEND_S = 60.0
"""Silence after which the store is made to agree with the ledger: what somebody wrote into it may keep tickets from everybody."""
FAULTS = frozenset({DEAD, DEADLY, UNTRAINABLE, "filter_failed"})
"""Kinds of reasons that something is wrong with; others are those of filters, or of settings that have changed."""

MOST_KINDS = 20
"""Once groups were rejected for so many, a kind that is new counts as `OTHER`."""
KIND_CHARACTERS = 40
OTHER = "other"

Judge = Callable[[Group, int], str | None]
"""(group, version being trained) -> reason to reject it, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What one optimizer step trains on."""

    groups: tuple[Group, ...]
    rejected: tuple[tuple[Group, str], ...]
    """Groups that were consumed on the way but are not trained, with the reason."""
    takes: int
    taken_at: Mapping[int, float] = field(default_factory=dict)
    """Unix seconds by ticket id, of both kinds."""


@dataclass(slots=True, kw_only=True)
class Intake:
    """Collects `groups` accepted groups per step from one lane.

    Rejected groups give their credit back at once: the limit announced to the generators grows by one for
    each, so that refilling can never starve. Every id enters the ledger the moment it is taken.
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
    """Of the weights that are trained."""
    name_of: Callable[[int], int] = int
    """The id of a group by which everybody else knows the id that `buffer` gives it."""
    _accepted: list[Group] = field(default_factory=list)
    _rejected: list[tuple[Group, str]] = field(default_factory=list)
    _takes: int = 0
    _taken_at: dict[int, float] = field(default_factory=dict)
    _settled: dict[str, Any] = field(init=False)
    _arrived: int = 0
    _waiting_for: int = -1
    _version: int = -1
    """That `_trained` belongs to."""
    _trained: int = 0
    """Groups in the weights of `_version`; the ledger counts those of a step as soon as the step has them."""
    _issued_before: int = 0
    """The last id that was issued before this learner came."""
    _unfit: Counter[str] = field(default_factory=Counter)
    """Rejections of this step that count against `max_refills`."""
    _last_progress_s: float = field(default_factory=time.monotonic)
    _mended_at_s: float = -math.inf

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
        if version != self._waiting_for:  # before that the learner was busy: nobody was waiting
            self._waiting_for, self._last_progress_s = version, time.monotonic()
        while len(self._accepted) < self.groups:
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
            take = self.buffer.take(self.ledger, self.groups - len(self._accepted), window=self.window)
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

    def _finish(self) -> Collected:
        collected = Collected(
            groups=tuple(self._accepted), rejected=tuple(self._rejected), takes=self._takes, taken_at=self._taken_at
        )
        self.ledger.trained += len(self._accepted)
        self._settled = self.ledger.to_dict()
        self._accepted, self._rejected, self._takes, self._taken_at = [], [], 0, {}
        self._unfit.clear()
        return collected

    def _sort(self, take: Take, version: int) -> None:
        groups = self.gate.groups(self.buffer, take, self.name_of)
        if groups is None:
            return
        self.ledger.consume(take.ids)
        self._last_progress_s = time.monotonic()
        self._takes += 1
        self._taken_at |= dict.fromkeys(map(self.name_of, take.ids), time_of_day())
        for ticket_id, group in zip(take.ids, groups, strict=True):
            reason = self._reason(group, version)
            if reason is None:
                self._accepted.append(group)
            else:
                self._rejected.append((group, reason))
                self.ledger.count_rejected(kind := kind_of(reason))
                # The filters and settings of today are not to blame for what was issued before them; it is bounded, too.
                if reason != DISCARDED_LINEAGE and ticket_id > self._issued_before:
                    self._unfit[kind] += 1
        if self._rejected:
            self.open(version)
        self._check_refills()

    def _reason(self, group: Group, version: int) -> str | None:
        """Why it is not trained. A filter of the user's that cannot judge a group costs that group."""
        if group.dead_reason is not None:
            return group.dead_reason
        try:
            reason = self.judge(group, version)
            return None if reason is None else self._bounded(reason)
        except Exception as error:
            log.exception("group %d cannot be judged and is not trained", group.ticket_id, extra={"ticket_id": group.ticket_id})
            return one_line(f"filter_failed: {type(error).__name__}: {error}")

    def _bounded(self, reason: str) -> str:
        """A filter's reason as it is kept: its kind is part of a metric's name and a key of the ledger in every checkpoint."""
        if not isinstance(reason, str):
            raise TypeError(f"a filter returned {reason!r:.100}; it must return a reason, as text, or None")
        kind = re.sub(r"[^A-Za-z0-9_.-]", "_", kind_of(reason).strip())[:KIND_CHARACTERS] or "unnamed"
        if kind not in self.ledger.rejected and len(self.ledger.rejected) >= MOST_KINDS:
            if OTHER not in self.ledger.rejected:
                log.warning(
                    "filters have given %d kinds of reasons to reject a group; further kinds count as `%s`, the first is `%s`. "
                    "Write what differs from group to group behind a colon: the text before it is the kind, the name of a metric",
                    *(MOST_KINDS, OTHER, one_line(reason)[:200]),
                )
            kind = OTHER
        return one_line(reason if kind == kind_of(reason) else f"{kind}: {reason}")

    def _check_refills(self) -> None:
        most = self.max_refills * self.groups
        if (unfit := self._unfit.total()) > most:
            [(commonest, _)] = self._unfit.most_common(1)
            example = next(reason for _, reason in reversed(self._rejected) if kind_of(reason) == commonest)
            cure = (
                f"No filter did that: mend what the reasons name. The last one of {commonest} is `{example}`"
                if commonest in FAULTS
                else "Use easier or harder prompts so that rewards within a group differ, drop the filter, or raise the limit"
            )
            raise RunError(
                f"one optimizer step: {unfit} groups were rejected in {self._takes} takes ({dict(self._unfit)}), only "
                f"{len(self._accepted)} of {self.groups} accepted; algorithm.max_refills allows {most} rejections. {cure}"
            )

    def _check_stall(self, version: int) -> None:
        arrived = self.buffer.audit().counters.get("put", 0)
        if arrived != self._arrived:
            self._arrived, self._last_progress_s = arrived, time.monotonic()
        silent_s = time.monotonic() - self._last_progress_s
        if silent_s > min(MEND_S, self.stall_s / 2) and self._mended_at_s < self._last_progress_s:
            log.info("no group arrived for %.0f s; the store is made to agree with the ledger, should it be to blame", silent_s)
            self._mended_at_s = time.monotonic()
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


def make_judge(
    filters: Sequence[Callable[[GroupOutcome], str | None]],
    *,
    drop_older_than: int | None,
    needs_greedy: bool = False,
    history: History = INITIAL,
) -> Judge:
    """Rejects what cannot be trained on, and what the group filters reject.

    Never trained: tokens of weights that are not in `history`, or newer than the version being trained (the learner lost them
    when it went back to a checkpoint), groups with a token older than `drop_older_than` (unless `staleness.policy` is drop, only
    those can be whose ticket was issued for steps that the learner lost), and, where the advantage needs a greedy reward,
    groups without one (of an earlier algorithm).
    """

    def judge(group: Group, version: int) -> str | None:
        sampled_by = {span.weights for rollout in group.rollouts for span in rollout.version_spans}
        versions = [weights.version for weights in sampled_by] or [version]
        if max(versions) > version or not all(weights in history for weights in sampled_by):
            return DISCARDED_LINEAGE
        if drop_older_than is not None and version - min(versions) > drop_older_than:
            return "stale"
        if needs_greedy and group.greedy_reward is None:
            return "no_greedy_reward"
        outcome = GroupOutcome(
            rewards=tuple(rollout.reward for rollout in group.rollouts),
            lengths=tuple(len(rollout.response_ids) for rollout in group.rollouts),
            finish_reasons=tuple(rollout.finish_reason for rollout in group.rollouts),
        )
        return next((reason for accepts in filters if (reason := accepts(outcome)) is not None), None)

    return judge
