"""A watch on the arrival of groups: it repairs a store that brings none, and gives up after `stall_s`."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.buffer.base import LearnerBuffer
from asyncrl.errors import RunError
from asyncrl.hosting.progress import Attention

log = logging.getLogger(__name__)

# After this silence the learner recovers the store. A change by hand may have removed the missing tickets.
REPAIR_AFTER_S = 60.0
LONGEST_LOOK_S = 60.0  # from one look to the next; in more time all processes of the run were stopped


@dataclass(slots=True)
class StallWatch:
    """Measures silence: the time in which the learner runs, waits, and gets no group."""

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
