"""Several trackers behind one, and the alarms. A tracker that fails is left out with one message; training never notices."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.schema import TelemetryConfig
from asyncrl.telemetry.alarms import Alarms
from asyncrl.telemetry.base import SampleRecord, Tracker
from asyncrl.telemetry.jsonl import JsonlTracker

log = logging.getLogger(__name__)


class Trackers:
    """Hands everything to every tracker that still works."""

    def __init__(self, openers: Iterable[Callable[[], Tracker]], alarms: Alarms) -> None:
        """Open each tracker; one that cannot be opened is left out. `alarms` watch what is logged by step."""
        self._alarms = alarms
        self._trackers: list[Tracker] = []
        for opener in openers:
            try:
                self._trackers.append(opener())
            except Exception:
                log.exception("a tracker cannot be opened and is left out; training goes on")

    def add(self, tracker: Tracker) -> None:
        """One more, open already."""
        self._trackers.append(tracker)

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Log to all, with the alarms."""
        watched = metrics if step is None else {**metrics, **self._alarms.watch(metrics, step)}
        self._each(lambda tracker: tracker.log(watched, step=step))

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Show rollouts to all."""
        self._each(lambda tracker: tracker.samples(records))

    def close(self) -> None:
        """Close all."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception:
                self._trackers.remove(tracker)
                log.exception("%s failed and is left out from now on; training goes on", type(tracker).__name__)


def open_trackers(
    config: TelemetryConfig,
    *,
    run: str,
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
        directory: the run directory.
        metrics: JSONL file for metrics.
        samples: JSONL file for rollouts.
        resolved: the whole config as plain values: to be shown, and for the limits that alarms go by.
        step: finished steps; later ones that an earlier process logged are made again.
    """

    def open_wandb(mode: Literal["online", "offline"]) -> Tracker:
        from asyncrl.telemetry.wandb import WandbTracker

        return WandbTracker(mode=mode, project=config.wandb_project, name=run, directory=directory, config=resolved)

    def open_tensorboard() -> Tracker:
        from asyncrl.telemetry.tensorboard import TensorBoardTracker

        return TensorBoardTracker(directory / "tensorboard", config=resolved, step=step)

    def open_trackio() -> Tracker:
        from asyncrl.telemetry.trackio import TrackioTracker

        return TrackioTracker(project=config.trackio_project, name=run, config=resolved)

    openers: list[Callable[[], Tracker]] = [lambda: JsonlTracker(metrics, samples)]
    if config.wandb != "off":
        openers.append(partial(open_wandb, config.wandb))
    if config.tensorboard:
        openers.append(open_tensorboard)
    if config.trackio:
        openers.append(open_trackio)
    return Trackers(openers, Alarms(probe_limit=resolved["weights"]["probe_limit"]))
