"""Watches on a lane: its law issued = leased + reissue + ready + taken + done, and the arrival of groups."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.backoff import Backoff
from asyncrl.buffer.base import Audit, LearnerBuffer
from asyncrl.errors import RunError
from asyncrl.hosting.progress import Attention

log = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0
_BACKOFF = Backoff(2 * CHECK_EVERY_S, 600.0)
# After this silence the learner recovers the store. A change by hand may have removed the missing tickets.
REPAIR_AFTER_S = 60.0
LONGEST_LOOK_S = 60.0  # from one look to the next; in more time all processes of the run were stopped


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
        if self._clock() - self._checked_at_s < CHECK_EVERY_S:
            return audit
        self._checked_at_s = self._clock()
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
        return audit


@dataclass(slots=True)
class StallWatch:
    """Measures silence: the learner waits and gets no group. The watch repairs the store, then gives up."""

    buffer: LearnerBuffer
    stall_s: float
    # The groups that the store had counted at the last check.
    _arrived: int = 0
    _waiting_for: int = -1
    _clock: Attention = field(default_factory=lambda: Attention(longest_s=LONGEST_LOOK_S))
    _last_progress_s: float = 0.0
    _repaired_at_s: float = -1.0

    def waits_for(self, version: int) -> None:
        """Note the step that the learner waits for. The silence of a new step begins now."""
        if version != self._waiting_for:
            self._waiting_for, self._last_progress_s = version, self._clock.look()

    def progress(self) -> None:
        """Note that groups were taken."""
        self._last_progress_s = self._clock.look()

    def check(self, recover: Callable[[], None]) -> None:
        """Call `recover` once after a long silence. Raises RunError after `stall_s` of it."""
        arrived, now_s = self.buffer.audit().counters.get("put", 0), self._clock.look()
        if arrived != self._arrived:
            self._arrived, self._last_progress_s = arrived, now_s
        silent_s = now_s - self._last_progress_s
        if silent_s > min(REPAIR_AFTER_S, self.stall_s / 2) and self._repaired_at_s < self._last_progress_s:
            log.info(
                "no group arrived for %.0f s: engines may be starting, or groups take that long; in case the "
                "store lost tickets, it is made to agree with the ledger",
                silent_s,
            )
            self._repaired_at_s = now_s
            recover()
        if silent_s > self.stall_s:
            raise RunError(
                f"no group arrived for {silent_s:.0f} s (control.stall_s is {self.stall_s:.0f}); "
                "look at the generators' logs, or start generators with `asyncrl generator`"
            )
