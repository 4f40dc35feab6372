"""How a generator spends its time: sampling, or standing still for weights."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """Seconds up to the last `settle`, and what is going on now."""

    busy_s: float = 0.0  # at least one group was being sampled
    stalled_s: float = 0.0  # the engine was paused for weights, or all that could start waits for newer ones
    sampling: int = 0  # groups
    waiting: int = 0  # tickets that wait for newer weights
    episodes: int = 0  # of these groups; a single response counts as one
    _paused: bool = False
    _since_s: float = field(default_factory=time.monotonic)

    def settle(self) -> None:
        """Count the time since the last call."""
        now_s = time.monotonic()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        self.busy_s += elapsed_s * (self.sampling > 0)
        self.stalled_s += elapsed_s * (self._paused or (self.waiting > 0 and self.sampling == 0))

    def pause(self, paused: bool) -> None:
        """The engine is paused for weights, or it no longer is."""
        self.settle()
        self._paused = paused

    @contextmanager
    def group(self, episodes: int) -> Iterator[None]:
        """One more group, of this many episodes or single responses, is sampled during the body."""
        self.settle()
        self.sampling += 1
        self.episodes += episodes
        try:
            yield
        finally:
            self.settle()
            self.sampling -= 1
            self.episodes -= episodes

    @contextmanager
    def wait(self) -> Iterator[None]:
        """One more ticket waits for weights during the body."""
        self.settle()
        self.waiting += 1
        try:
            yield
        finally:
            self.settle()
            self.waiting -= 1
