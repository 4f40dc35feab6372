"""Watches the conservation law of a lane while the run goes on: issued = leased + reissue + ready + taken + done."""

import logging
import time
from collections.abc import Callable

from asyncrl.backoff import Backoff
from asyncrl.buffer.base import Audit

log = logging.getLogger(__name__)

JUDGE_EVERY_S = 10.0
_BACKOFF = Backoff(2 * JUDGE_EVERY_S, 600.0)


class AuditWatch:
    """Counts whenever it is asked, and judges every 10 s.

    A mismatch counts when two judgements in a row find one: a recovery mends what somebody broke by hand a moment before.
    """

    def __init__(self, lane: str, count: Callable[[], Audit], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`count` is the audit of a buffer, `lane` its name in messages."""
        self._lane = lane
        self._count = count
        self._clock = clock
        self._judged_at_s = -JUDGE_EVERY_S
        self._was_missing = False
        self.recoveries = 0
        self._next_recovery_s = 0.0
        self.mismatch = 0
        """Ids that are nowhere (> 0) or in two places (< 0), as long as it lasts."""

    def is_recovery_due(self) -> bool:
        """Whether the learner shall make the store agree with its ledger now: while ids are missing, ever more seldom."""
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
        """Where every issued id is now. Raises what the buffer raises."""
        audit = self._count()
        if self._clock() - self._judged_at_s >= JUDGE_EVERY_S:
            self._judged_at_s = self._clock()
            self._judge(audit)
        return audit

    def _judge(self, audit: Audit) -> None:
        found = audit.missing if self._was_missing else 0
        self._was_missing = audit.missing != 0
        if found and not self.mismatch:
            log.error(
                "%s: %d issued ids are %s: issued %d, leased %d, reissue %d, ready %d, taken %d, done %d. The learner makes the "
                "store agree with its ledger by itself. Somebody has changed the store by hand, or asyncrl is at fault: then "
                "keep the run directory and report it",
                *(self._lane, abs(found), "nowhere" if found > 0 else "in two places"),
                *(audit.issued, audit.leased, audit.reissue, audit.ready, audit.taken, audit.done),
            )
        if self.mismatch and not found:
            log.warning("%s: every issued id is in one place again", self._lane)
        self.mismatch = found
