"""What is only for people must not end what it tells of: one guard around everything that is shown."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class Guard:
    """Catches what a part of the telemetry raises. Any thread may use it."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """By part, so far."""

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """`with guard("samples"): ...` counts what is raised within; the first of each part is logged with its traceback."""
        try:
            yield
        except Exception as error:
            self.failures[part] += 1
            if self.failures[part] == 1:
                log.exception("telemetry: %s failed and are left out this time; training goes on", part)
            else:
                log.debug("telemetry: %s failed again: %s", part, error)

    @property
    def total(self) -> int:
        """Failures of all parts."""
        return self.failures.total()
