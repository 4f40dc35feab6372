"""A watch on the conservation law of a lane: issued = leased + reissue + ready + taken + done."""

import logging
import time
from collections.abc import Callable

from asyncrl.backoff import Backoff
from asyncrl.buffer.base import Audit

log = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0
_BACKOFF = Backoff(2 * CHECK_EVERY_S, 600.0)


class AuditWatch:
    """Checks the audits of a lane every 10 s. A mismatch must last two checks: a recovery may be running."""

    def __init__(
        self, lane: str, count: Callable[[], Audit], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lane = lane
        self._count = count
        self._clock = clock
        self._checked_at_s = -CHECK_EVERY_S
        self._was_missing = False
        self.recoveries = 0
        self._next_recovery_s = 0.0
        # `Audit.missing` of the last check, if it lasted.
        self.mismatch = 0

    def is_recovery_due(self) -> bool:
        """True at growing intervals while there is a mismatch: then the learner must recover the lane."""
        if not self.mismatch:
            return False
        now_s = self._clock()
        if now_s < self._next_recovery_s:
            return False
        self.recoveries += 1
        log.warning("%s: the learner repairs the store from its ledger", self._lane)
        self._next_recovery_s = now_s + _BACKOFF.pause_s(self.recoveries)
        return True

    def audit(self) -> Audit:
        """Return the buffer's audit, with its errors."""
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
                "The learner repairs the store from its ledger. If the store was not changed by hand, this "
                "is a defect of asyncrl: keep the run directory and report it",
                *(self._lane, abs(found), "nowhere" if found > 0 else "in two places"),
                *(audit.issued, audit.leased, audit.reissue, audit.ready, audit.taken, audit.done),
            )
        if self.mismatch and not found:
            log.warning("%s: every issued id is in one place again", self._lane)
        self.mismatch = found
