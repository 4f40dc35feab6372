"""A generator's reports: progress to its supervisor, heartbeats to the learner, metrics to trackers."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from asyncrl.adoption import Adoption
from asyncrl.control.base import GeneratorControl, Heartbeat, Hello
from asyncrl.engine.base import Engine
from asyncrl.engine.duty import Duty
from asyncrl.engine.sampler import GroupSampler
from asyncrl.hosting.progress import beat
from asyncrl.telemetry.base import Tracker

PROGRESS_S = 1.0
LOG_S = 5.0
RATE_S = 60.0  # tokens count when their group ends, so a shorter rate is mostly 0


@dataclass(slots=True, kw_only=True)
class Heartbeats:
    """The tasks `show_progress` and `run`, and the counters that only they read."""

    engine: Engine
    sampler: GroupSampler
    weights: Adoption
    control: GeneratorControl
    tracker: Tracker
    every_s: float
    duty: Duty
    holds_tickets: Callable[[], bool]
    groups: int = 0  # groups that the store accepted
    failed: int = 0  # tickets whose reward or result failed
    _started_s: float = field(default_factory=time.monotonic)

    async def show_progress(self) -> None:
        """Report progress to the supervisor while both the event loop and the engine make progress."""
        while True:
            await self.engine.progress()
            beat()
            await asyncio.sleep(PROGRESS_S)

    async def run(self, hello: Hello) -> None:
        """Send a heartbeat every `every_s`, and log its metrics every `LOG_S`."""
        marks = deque([(time.monotonic(), 0)], maxlen=math.ceil(RATE_S / self.every_s))
        logged_at_s = 0.0
        while True:
            now_s = time.monotonic()
            at_s, tokens_before = marks[0]
            metrics = self._metrics(tokens_before, max(now_s - at_s, 1e-6))
            marks.append((now_s, int(metrics["sampled_tokens"])))
            heartbeat = Heartbeat(
                generator_id=hello.generator_id,
                incarnation=hello.incarnation,
                version=self.weights.version,
                state=self._state(),
                metrics=metrics,
            )
            self.control.beat(heartbeat)
            if now_s - logged_at_s >= LOG_S:
                logged_at_s = now_s
                self.tracker.log(metrics)
            await asyncio.sleep(self.every_s)

    def _metrics(self, tokens_before: int, elapsed_s: float) -> Mapping[str, float]:
        stats = self.engine.stats()
        alive_s, clock = time.monotonic() - self._started_s, self.sampler.clock
        clock.settle()
        return {
            "sampled_tokens": stats.sampled_tokens,
            "tokens_per_s": (stats.sampled_tokens - tokens_before) / elapsed_s,
            "running_requests": stats.running_requests,
            "paused_s": stats.paused_s,
            "idle_s": alive_s - clock.busy_s,
            "stalled_s": clock.stalled_s,
            "alive_s": alive_s,
            "groups": self.groups,
            "rewards_failed": self.failed,
            **{f"environment_faults_{reason}": n for reason, n in self.sampler.faults.items()},
            **self.sampler.counts,
            **self.duty.metrics(),
            "version": self.weights.version,
        }

    def _state(self) -> str:
        if self.weights.is_updating:
            return "updating"
        if self.weights.version < 0:
            return "dirty"
        if self.sampler.clock.sampling:
            return "sampling"
        return "waiting_weights" if self.holds_tickets() else "waiting_tickets"
