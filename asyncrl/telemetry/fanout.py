"""Several trackers behind one, and the alarms. A tracker that fails is told once and tried again; training never notices."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from asyncrl.best_effort import BestEffort
from asyncrl.config.schema import TelemetryConfig
from asyncrl.telemetry.alarms import Alarms
from asyncrl.telemetry.base import SampleRecord, Tracker
from asyncrl.telemetry.jsonl import JsonlTracker

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""Between two attempts with a tracker that fails: some take a minute to find out that they cannot be reached."""


class Trackers:
    """Hands everything to every tracker; one that fails is let alone for a while, and opened or asked again then."""

    def __init__(self, openers: Iterable[Callable[[], Tracker]], alarms: Alarms) -> None:
        """Open each tracker. `alarms` watch what is logged by step."""
        self._alarms = alarms
        self._trackers = [_Kept(opener) for opener in openers]
        self._each("open", lambda tracker: None)

    def add(self, tracker: Tracker) -> None:
        """One more, open already."""
        self._trackers.append(_Kept(lambda: tracker))

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Log to all, with the alarms."""
        watched = metrics if step is None else {**metrics, **self._alarms.watch(metrics, step)}
        self._each("log", lambda tracker: tracker.log(watched, step=step))

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Show rollouts to all."""
        self._each("samples", lambda tracker: tracker.samples(records))

    def close(self) -> None:
        """Close all."""
        for kept in self._trackers:
            kept.close()
        self._trackers.clear()

    def _each(self, what: str, call: Callable[[Tracker], None]) -> None:
        for kept in self._trackers:
            kept.call(what, call)


class _Kept:
    """One tracker. What it is not told while it is let alone, it never hears."""

    def __init__(self, opener: Callable[[], Tracker]) -> None:
        self._opener = opener
        self._tracker: Tracker | None = None
        self._may_fail = BestEffort()
        self._pause_s, self._again_at_s = FIRST_PAUSE_S, 0.0

    def call(self, what: str, call: Callable[[Tracker], None]) -> None:
        """Never raises."""
        now_s = time.monotonic()
        if now_s < self._again_at_s:
            return
        with self._may_fail(f"{what} of {self._name}") as attempt:
            call(self._opened())
        if attempt.succeeded:
            self._pause_s = FIRST_PAUSE_S
        else:
            self._again_at_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def close(self) -> None:
        """Never raises."""
        if self._tracker:
            with self._may_fail(f"close of {self._name}"):
                self._tracker.close()

    @property
    def _name(self) -> str:
        return type(self._tracker).__name__ if self._tracker else "a tracker that is not open yet"

    def _opened(self) -> Tracker:
        self._tracker = self._tracker or self._opener()
        return self._tracker


def open_trackers(
    config: TelemetryConfig,
    *,
    run: str,
    key_id: str,
    directory: Path,
    metrics: Path,
    samples: Path,
    resolved: Mapping[str, Any],
    step: int = 0,
) -> Trackers:
    """The learner's trackers: JSONL always, the others when asked for. Their libraries are imported only then.

    Args:
        config: what was asked for.
        run: its name.
        key_id: of its key: a run that begins anew under its name has another, and writes over no old curves.
        directory: the run directory.
        metrics: JSONL file for metrics.
        samples: JSONL file for rollouts.
        resolved: the whole config as plain values: to be shown, and for the limits that alarms go by.
        step: finished steps; later ones that an earlier process logged are made again.
    """

    run_id = f"{run}-{key_id}"

    def open_wandb(mode: Literal["online", "offline"]) -> Tracker:
        from asyncrl.telemetry.wandb import WandbTracker

        return WandbTracker(
            mode=mode, project=config.wandb_project, name=run, run_id=run_id, directory=directory, config=resolved
        )

    def open_tensorboard() -> Tracker:
        from asyncrl.telemetry.tensorboard import TensorBoardTracker

        return TensorBoardTracker(directory / "tensorboard", config=resolved, step=step)

    def open_trackio() -> Tracker:
        from asyncrl.telemetry.trackio import TrackioTracker

        return TrackioTracker(project=config.trackio_project, name=run_id, config=resolved)

    openers: list[Callable[[], Tracker]] = [lambda: JsonlTracker(metrics, samples)]
    if config.wandb != "off":
        openers.append(partial(open_wandb, config.wandb))
    if config.tensorboard:
        openers.append(open_tensorboard)
    if config.trackio:
        openers.append(open_trackio)
    return Trackers(openers, Alarms(probe_limit=resolved["weights"]["probe_limit"]))
