"""Trackio: a local database without an account; `trackio show --project NAME` opens it."""

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.extras import from_extra
from asyncrl.telemetry.base import COLUMNS, SampleRecord, SampleTables, split
from asyncrl.telemetry.jsonl import to_json


class TrackioTracker:
    """A Trackio run with our run's name, continued by a resume. `TRACKIO_DIR` sets the database's place."""

    def __init__(self, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        """Open the run."""
        with from_extra("trackio"):
            import trackio

        self._trackio = trackio
        self._tables = SampleTables()
        options = {"resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(project=project, name=name, config=dict(config), **options)

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Log by step; without a step, in order of time."""
        numbers, histograms = split(metrics)
        draw = self._trackio.Histogram
        drawn = {name: draw(np_histogram=(one.counts, one.edges)) for name, one in histograms.items()}
        self._run.log(to_json(numbers) | drawn, step=step)

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Show rollouts as a table, every few steps."""
        if rows := self._tables.rows(records):
            table = self._trackio.Table(columns=list(COLUMNS), data=rows)
            self._run.log({f"samples/{records[-1].kind}": table}, step=records[-1].step)

    def close(self) -> None:
        """Write what is pending and close the run."""
        self._run.finish()
