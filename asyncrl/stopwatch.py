"""Times the parts of a step and reports each to the supervisor as it begins."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.hosting.progress import Pace, begin
from asyncrl.types import time_of_day


class Span(NamedTuple):
    """One part of a step."""

    name: str
    started_at: float  # Unix seconds
    duration_s: float


@dataclass(slots=True)
class Stopwatch:
    """Seconds by name, and the spans in which they passed."""

    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def time(self, name: str, pace: Pace = Pace.NORMAL) -> Iterator[None]:
        """Report that `name` begins, and add the duration of the body to it."""
        begin(name, pace)
        started_at, started_s = time_of_day(), time.perf_counter()
        try:
            yield
        finally:
            duration_s = time.perf_counter() - started_s
            self.seconds[name] = self.seconds.get(name, 0.0) + duration_s
            self.spans.append(Span(name, started_at, duration_s))
