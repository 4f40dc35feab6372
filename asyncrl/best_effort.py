"""What is only for people, or is done again soon anyway, may fail: a full disk there must not end what a run lives by."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from asyncrl.errors import AsyncRLError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Attempt:
    """What became of it."""

    succeeded: bool = False


class BestEffort:
    """Where something may fail. Each kind of failure is told once, all are counted, and the next call tries again."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()  # by what was tried
        self._failing: dict[str, tuple[type[Exception], object]] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[Attempt]:
        """`with may_fail("the view"): ...` ends quietly whatever is raised within. `what` names it in the log."""
        attempt = Attempt()
        try:
            yield attempt
        except Exception as error:  # noqa: BLE001 - whatever it is, those who live by this call go on
            self._note(what, error)
            return
        attempt.succeeded = True
        if self._failing.pop(what, None):
            log.info("%s works again, after %d failures", what, self.failures[what])

    def _note(self, what: str, error: Exception) -> None:
        self.failures[what] += 1
        kind = (type(error), getattr(error, "errno", None))
        if self._failing.get(what) != kind:
            self._failing[what] = kind
            is_foreseen = isinstance(error, (OSError, AsyncRLError))
            log.error(
                "%s failed and will be tried again; the run goes on: %s", what, error, exc_info=None if is_foreseen else error
            )
