"""Calls that may fail without ending a run, such as output for people on a full disk, or work that is soon
repeated."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from asyncrl.errors import AsyncRLError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Attempt:
    """Whether a call succeeded."""

    succeeded: bool = False


class BestEffort:
    """Catches failures. Each kind of failure is logged once, all are counted, and the next call tries
    again."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()  # number of failures by the name of the call
        self._failing: dict[str, tuple[type[Exception], object]] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[Attempt]:
        """Run the body and log what it raises: `with may_fail("the view"): ...`. `what` names the call in the
        log."""
        attempt = Attempt()
        try:
            yield attempt
        except Exception as error:
            # No error of this call may end the run.
            self.failures[what] += 1
            kind = (type(error), getattr(error, "errno", None))
            if self._failing.get(what) != kind:
                self._failing[what] = kind
                trace = None if isinstance(error, (OSError, AsyncRLError)) else error
                log.error(
                    "%s failed and will be tried again; the run goes on: %s", what, error, exc_info=trace
                )
            return
        attempt.succeeded = True
        if self._failing.pop(what, None):
            log.info("%s works again, after %d failures", what, self.failures[what])
