"""Calls that may fail without ending a run: output for people on a full disk, work that is soon repeated."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.errors import AsyncRLError

log = logging.getLogger(__name__)


class BestEffort:
    """Catches failures. All are counted, and a call that fails in the same way again is logged once."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()  # number of failures by the name of the call
        self._failing: dict[str, tuple[type[Exception], object]] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Run the body and log what it raises. The log names it `what`: `with may_fail("the view"): ...`."""
        try:
            yield
        except Exception as error:  # no error of this call may end the run
            self.failures[what] += 1
            kind = (type(error), getattr(error, "errno", None))
            if self._failing.get(what) != kind:
                self._failing[what] = kind
                trace = None if isinstance(error, (OSError, AsyncRLError)) else error
                said = "%s failed and will be tried again; the run goes on: %s"
                log.error(said, what, error, exc_info=trace)
            return
        if self._failing.pop(what, None):
            log.info("%s works again, after %d failures", what, self.failures[what])
