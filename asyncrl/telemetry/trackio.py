"""Trackio: a local database without an account; `trackio show --project NAME` opens it."""

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.extras import from_extra
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.histograms import split
from asyncrl.telemetry.jsonl import to_json
from asyncrl.telemetry.tables import COLUMNS, SampleTables


class TrackioTracker:
    """A Trackio run of the same name as ours; a resumed run goes on in it. `TRACKIO_DIR` says where the database is."""

    def __init__(self, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        """Open the run."""
        with from_extra("trackio"):
            import trackio

        self._trackio = trackio
        self._tables = SampleTables()
        self._run = trackio.init(
            project=project, name=name, config=dict(config), resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Log by step; without one, in the order of time."""
        numbers, histograms = split(metrics)
        drawn = {name: self._trackio.Histogram(np_histogram=(one.counts, one.edges)) for name, one in histograms.items()}
        self._run.log(to_json(numbers) | drawn, step=step)

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Show rollouts as a table, where one is due."""
        if rows := self._tables.rows(records):
            table = self._trackio.Table(columns=list(COLUMNS), data=rows)
            self._run.log({f"samples/{records[-1].kind}": table}, step=records[-1].step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()
