"""Sends metrics to all trackers and alarms. A tracker that fails is tried again; training continues."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.backoff import Backoff
from asyncrl.best_effort import BestEffort
from asyncrl.config.sections import TelemetryConfig
from asyncrl.telemetry.alarms import Alarms
from asyncrl.telemetry.base import SampleRecord, Tracker
from asyncrl.telemetry.state import LEARNER
from asyncrl.telemetry.trackers import JsonlTracker, TensorBoardTracker, WandbTracker

log = logging.getLogger(__name__)

# Pause after a failed attempt with a tracker. It grows, because some trackers need a minute to fail.
BACKOFF = Backoff(1.0, 300.0)
MOST_TOLD = 100  # metrics of which the log says that they are no numbers


class Trackers:
    """Passes every call to every tracker. A tracker that fails is skipped for a while, then tried again."""

    def __init__(self, openers: Iterable[Callable[[], Tracker]], also: Tracker | None = None) -> None:
        """Open each tracker but `also`, which is open. Alarms watch the metrics that are logged by step."""
        self._alarms = Alarms()
        self._told: set[str] = set()  # names of metrics whose value was no number
        self._trackers = [_Kept(opener) for opener in (*openers, *([lambda: also] if also else []))]
        self._each("open", lambda tracker: None)

    @property
    def failed(self) -> int:
        """Number of calls of trackers that have failed."""
        return sum(kept.may_fail.failures.total() for kept in self._trackers)

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Log to all trackers, with the alarms. They get any name as text, and NaN for what is no number."""
        numbers: dict[str, float] = {}
        for key, value in metrics.items():
            name = str(key).encode(errors="backslashreplace").decode()
            try:
                math.isfinite(value)  # unlike float(), it refuses texts and bytes
                numbers[name] = float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: several numbers of torch
                numbers[name] = math.nan
                if name not in self._told and len(self._told) < MOST_TOLD:
                    self._told.add(name)
                    message = "metric %s is %s, not a number, and counts as NaN; log numbers only"
                    log.warning(message, name, f"{type(value).__name__} `{str(value)[:80]}`")
        watched = numbers if step is None else numbers | self._alarms.watch(numbers, step)
        self._each("log", lambda tracker: tracker.log(watched, step=step))

    def samples(self, records: Sequence[SampleRecord]) -> None:
        self._each("samples", lambda tracker: tracker.samples(records))

    def close(self) -> None:
        for kept in self._trackers:
            kept.close()
        self._trackers.clear()

    def _each(self, what: str, call: Callable[[Tracker], None]) -> None:
        for kept in self._trackers:
            kept.call(what, call)


class _Kept:
    """One tracker with its failures. While it is paused after a failure, calls are dropped."""

    def __init__(self, opener: Callable[[], Tracker]) -> None:
        self._opener = opener
        self._tracker: Tracker | None = None
        self.may_fail = BestEffort()
        self._failures, self._again_at_s = Counter[str](), 0.0  # failures in a row, by call

    def call(self, what: str, call: Callable[[Tracker], None]) -> None:
        """Call the tracker and log its failure. Never raises."""
        if time.monotonic() < self._again_at_s:
            return
        what = what if self._tracker else "open"
        self._failures[what] += 1  # unless it succeeds
        with self.may_fail(f"{what} of {self._name}"):
            self._tracker = self._tracker or self._opener()
            call(self._tracker)
            self._failures[what] = 0
        if self._failures[what]:
            self._again_at_s = time.monotonic() + BACKOFF.pause_s(self._failures[what])

    def close(self) -> None:
        if self._tracker:
            with self.may_fail(f"close of {self._name}"):
                self._tracker.close()

    @property
    def _name(self) -> str:
        return type(self._tracker).__name__ if self._tracker else "a tracker that is not open yet"


def open_trackers(
    config: TelemetryConfig,
    run: str,
    directory: Path,
    values: Mapping[str, Any],
    *,
    key_id: str,
    step: int = 0,
    also: Tracker | None = None,
) -> Trackers:
    """Open the learner's trackers: JSONL, `also`, and with their libraries those that the config wants.

    They are of the run in `directory`, and show the `values` of its whole config. `key_id` is the id of its
    key: a fresh run of the same name has another, so it keeps the old curves. Steps after `step`, which an
    earlier process logged, will be logged again.
    """
    metrics, samples = directory / "metrics" / f"{LEARNER}.jsonl", directory / "samples.jsonl"
    openers: list[Callable[[], Tracker]] = [partial(JsonlTracker, metrics, samples)]
    if config.wandb != "off":
        openers.append(partial(WandbTracker, config, run, directory, values, f"{run}-{key_id}"))
    if config.tensorboard:
        openers.append(partial(TensorBoardTracker, directory / "tensorboard", values, step))
    return Trackers(openers, also)
