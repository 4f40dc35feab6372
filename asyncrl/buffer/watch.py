"""Checks the conservation law of a lane during the run: issued = leased + reissue + ready + taken + done."""

import logging
import time
from collections.abc import Callable

from asyncrl.backoff import Backoff
from asyncrl.buffer.base import Audit

log = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0
_BACKOFF = Backoff(2 * CHECK_EVERY_S, 600.0)


class AuditWatch:
    """Counts at every call, and checks the counts every 10 s.

    Only a mismatch in two checks in a row counts, because a recovery may be under way.
    """

    def __init__(
        self, lane: str, count: Callable[[], Audit], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`count` is the audit of a buffer, `lane` its name in messages."""
        self._lane = lane
        self._count = count
        self._clock = clock
        self._checked_at_s = -CHECK_EVERY_S
        self._was_missing = False
        self.recoveries = 0
        self._next_recovery_s = 0.0
        # The number of ids that are in no place (> 0) or in two places (< 0).
        self.mismatch = 0

    def is_recovery_due(self) -> bool:
        """Whether the learner must recover the lane now: while there is a mismatch, at growing intervals."""
        if not self.mismatch:
            return False
        now_s = self._clock()
        if now_s < self._next_recovery_s:
            return False
        self.recoveries += 1
        log.warning("%s: the store is made to agree with the learner's ledger", self._lane)
        self._next_recovery_s = now_s + _BACKOFF.pause_s(self.recoveries)
        return True

    def audit(self) -> Audit:
        """The audit of the buffer, whose errors are passed on."""
        audit = self._count()
        if self._clock() - self._checked_at_s >= CHECK_EVERY_S:
            self._checked_at_s = self._clock()
            self._check(audit)
        return audit

    def _check(self, audit: Audit) -> None:
        found = audit.missing if self._was_missing else 0
        self._was_missing = audit.missing != 0
        if found and not self.mismatch:
            log.error(
                "%s: %d issued ids are %s: issued %d, leased %d, reissue %d, ready %d, taken %d, done %d. "
                "The learner makes the store agree with its ledger by itself. If the store was not changed "
                "by hand, this is a defect of asyncrl: keep the run directory and report it",
                *(self._lane, abs(found), "nowhere" if found > 0 else "in two places"),
                *(audit.issued, audit.leased, audit.reissue, audit.ready, audit.taken, audit.done),
            )
        if self.mismatch and not found:
            log.warning("%s: every issued id is in one place again", self._lane)
        self.mismatch = found
