"""How a generator spends its time, and how many episodes it holds: while one waits, another one samples."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.engine.base import Engine

WINDOW_S = 60.0


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


class _Mark(NamedTuple):
    """Sums up to a time."""

    at_s: float
    sampling_s: float  # seconds, added up over requests that have a slot
    episode_s: float  # seconds, added up over the episodes of groups that are played and wait for no slot


@dataclass(slots=True)
class Duty:
    """The duty of episodes: the share of their group's time in which they sample, and do not wait.

    They wait for the environment, and at their end for the other episodes of the group. Duty d is measured
    over the last minute, so `max_running / d` episodes fill the slots; at most `most_held` are held. Time in
    the engine's queue does not count: else a burst of episodes would look like a high duty, few would
    follow, and the two would alternate. Single responses count as episodes; of these alone, with 0 as
    `most_held`, as many are held as there are slots.
    """

    engine: Engine
    clock: Clock
    max_running: int
    most_held: int
    now: Callable[[], float] = time.monotonic
    _marks: deque[_Mark] = field(init=False)

    def __post_init__(self) -> None:
        self._marks = deque([_Mark(self.now(), 0.0, 0.0)])

    @property
    def share(self) -> float | None:
        """Return the duty, at most 1; None if nothing was sampled in the last minute."""
        sampling_s, played_s = self._measured()
        return min(sampling_s / played_s, 1.0) if played_s > 0 else None

    def room(self, held: int) -> int:
        """Return how many sequences more than `held` may be held; negative if fewer.

        What requests and episodes there are now counts for the time since the last call.
        """
        last, now_s = self._marks[-1], self.now()
        requests = self.engine.stats().running_requests
        queued = max(requests - self.max_running, 0)
        sampling_s = (requests - queued) * (now_s - last.at_s)
        episode_s = max(self.clock.episodes - queued, 0) * (now_s - last.at_s)
        self._marks.append(_Mark(now_s, last.sampling_s + sampling_s, last.episode_s + episode_s))
        while self._marks[0].at_s < now_s - WINDOW_S and len(self._marks) > 2:
            self._marks.popleft()
        # The duty if episodes sampled in the part of a minute of full slots that was not played yet. So the
        # number of episodes grows over a minute. If it grew suddenly, they would all wait at the same time,
        # and then all want to sample at the same time.
        sampling_s, played_s = self._measured()
        unplayed_s = max(0.0, self.max_running * WINDOW_S - played_s)
        sure = min((sampling_s + unplayed_s) / (played_s + unplayed_s), 1.0)
        most_held = max(self.most_held, self.max_running)
        return int(self.max_running / max(sure, self.max_running / most_held)) - held

    def _measured(self) -> tuple[float, float]:
        """Return the seconds of requests and of episodes in the window."""
        first, last = self._marks[0], self._marks[-1]
        return last.sampling_s - first.sampling_s, last.episode_s - first.episode_s

    def metrics(self) -> Mapping[str, float]:
        """Return occupancy and duty while groups are sampled, if there may be episodes among them."""
        if not self.most_held or (share := self.share) is None:
            return {}
        used = self.engine.stats().running_requests / self.max_running
        return {"engine/occupancy": min(used, 1.0), "episodes/duty": share}
