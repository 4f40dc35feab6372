"""TensorBoard event files: scalars and distributions by step, samples and the config as text."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.extras import from_extra
from asyncrl.telemetry.base import COLUMNS, SampleRecord, SampleTables, split

FLUSH_S = 10


class TensorBoardTracker:
    """Look with `tensorboard --logdir RUNS`."""

    def __init__(self, directory: Path, *, config: Mapping[str, Any], step: int = 0) -> None:
        """Begin a new event file in `directory` that replaces everything after `step`."""
        with from_extra("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

        self._tables = SampleTables()
        self._writer = SummaryWriter(log_dir=str(directory), purge_step=step + 1, flush_secs=FLUSH_S)
        self._writer.add_text("config", _code(json.dumps(config, indent=1)), global_step=step)

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Log by step. TensorBoard has no other axis, so metrics without a step are left out."""
        if step is None:
            return
        numbers, histograms = split(metrics)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=step)
        for name, histogram in histograms.items():
            counts, low = np.array(histogram.counts), np.array(histogram.edges[:-1])
            self._writer.add_histogram_raw(
                name,
                min=histogram.edges[0],
                max=histogram.edges[-1],
                num=counts.sum(),
                sum=(counts * low).sum(),
                sum_squares=(counts * low**2).sum(),
                bucket_limits=list(histogram.edges[1:]),
                bucket_counts=list(histogram.counts),
                global_step=step,
            )

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Show rollouts as text, every few steps."""
        if rows := self._tables.rows(records):
            lines = [[f"{name}: {cell}" for name, cell in zip(COLUMNS, row, strict=True)] for row in rows]
            text = _code("\n\n".join(map("\n".join, lines)))
            self._writer.add_text(f"samples/{records[-1].kind}", text, global_step=records[-1].step)

    def close(self) -> None:
        """Write what is pending and close the file."""
        self._writer.close()


def _code(text: str) -> str:
    """Return Markdown that shows a model's text verbatim; half an emoji, which UTF-8 lacks, is escaped."""
    return "\n".join(f"    {line}" for line in text.encode(errors="backslashreplace").decode().splitlines())
