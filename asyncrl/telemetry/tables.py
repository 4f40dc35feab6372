"""Rollouts as a table, for trackers that show one now and then: a table of every step would be most of what a run uploads."""

from collections.abc import Sequence
from typing import Any

from asyncrl.telemetry.base import SampleRecord

COLUMNS = (
    "step", "kind", "prompt", "response", "reward", "parts", "advantage", "versions", "finish_reason", "generator_id", "reason",
    "answer",
)  # fmt: skip
SAMPLES_EVERY = 10
"""Steps between two tables of one kind."""


class SampleTables:
    """Says which rollouts are shown."""

    def __init__(self) -> None:
        self._shown_step: dict[str, int] = {}

    def rows(self, records: Sequence[SampleRecord]) -> list[list[str | int | float]]:
        """One row of `COLUMNS` for each record; none within `SAMPLES_EVERY` steps after the last table of this kind."""
        if not records:
            return []
        step, kind = records[-1].step, records[-1].kind
        if 0 <= step - self._shown_step.get(kind, -SAMPLES_EVERY) < SAMPLES_EVERY:
            return []
        self._shown_step[kind] = step
        return [[_cell(getattr(record, column)) for column in COLUMNS] for record in records]


def _cell(value: Any) -> str | int | float:
    return value if isinstance(value, (str, int, float)) else str(value)
