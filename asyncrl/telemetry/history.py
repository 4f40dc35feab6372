"""Reads JSON lines while another process writes them, and makes series of a run's metrics."""

import bisect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.files import tell_unreadable
from asyncrl.telemetry.text import number

REJECTED = "groups/rejected_"
MISSING = "episodes/missing/"
Row = dict[str, float]
Series = tuple[tuple[int, float], ...]  # (step, value), ascending
Points = Sequence[tuple[float, float]]  # (place, value), ascending; a `Series` is one


def thinned(points: Points, most: int) -> Points:
    """Return at most `most` points: each is the mean of neighbouring points, at the place of the last one."""
    size = -(-len(points) // most)
    if size <= 1:
        return points
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(run[-1][0], sum(value for _, value in run) / len(run)) for run in runs]


def highest(series: Series) -> tuple[int, float]:
    """Return the point with the highest value; the first of equals."""
    return max(series, key=lambda point: (point[1], -point[0]))


def score(row: Mapping[str, float], name: str, *notes: str) -> str:
    """Return a metric of `row` as text: its value, `±` and its standard error, (number of prompts, notes).

    For `eval/accuracy` these are `eval/se/accuracy` and `eval/prompts`, if the row has them.
    """
    kind, _, metric = name.rpartition("/")
    error, prompts = row.get(f"{kind}/se/{metric}"), row.get(f"{kind}/prompts")
    known = ([f"n {prompts:,.0f}"] if prompts is not None else []) + [*notes]
    spread = f" ± {number(error, 2)}" if error is not None else ""
    return f"{number(row[name])}{spread}" + (f" ({', '.join(known)})" if known else "")


class Tail:
    """Reads a growing JSONL file: each call returns the complete lines added since the last call."""

    def __init__(self, path: Path, *, last_bytes: int | None = None) -> None:
        """Start at the beginning, or at most `last_bytes` before the end."""
        self.path = path
        self.unreadable = 0  # lines that are not a JSON object, such as one that a crash cut off
        self._offset = max(0, self._size() - last_bytes) if last_bytes is not None else 0
        self._inside_line = self._offset > 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects written since the last call. A file that has shrunk is read again from 0."""
        size = self._size()
        if size < self._offset:
            self._offset, self._inside_line = 0, False
        if size == self._offset:
            return []
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            tell_unreadable(self.path, error)
            return []
        whole, newline, _ = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        lines = whole.split(b"\n") if newline else []
        if self._inside_line and lines:
            lines, self._inside_line = lines[1:], False
        records = [json_object(line) for line in lines if line]
        self.unreadable += records.count(None)
        return [record for record in records if record is not None]

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None for anything else, such as a line that a crash cut off."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def numbers(record: Mapping[str, Any]) -> Row:
    """Return the numeric values of a record."""
    plain = {name: value for name, value in record.items() if not isinstance(value, bool)}
    return {name: float(value) for name, value in plain.items() if isinstance(value, (int, float))}


def growth_share(before: Row, now: Row, name: str) -> float | None:
    """Return the growth of a counter of seconds as a share of the time between two lines of a generator.

    The counters start from 0 when the generator restarts. None if the share is not known.
    """
    if "alive_s" not in now:
        return None
    since = {} if now["alive_s"] <= before.get("alive_s", 0.0) else before
    alive_s = now["alive_s"] - since.get("alive_s", 0.0)
    counted_s = now.get(name, 0.0) - since.get(name, 0.0)
    return min(1.0, max(0.0, counted_s / alive_s)) if alive_s > 0 else None


class History:
    """Metrics by step. A step that is logged again, after a resume, replaces that step and all later ones.

    An evaluation may be logged steps later: `eval/` metrics are added to their step and replace no other.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.steps: list[int] = []  # of the rows, ascending: the dashboard often asks for the newest values
        self.rejected: Counter[str] = Counter()  # groups rejected in all steps, by reason
        self.missing: Counter[str] = Counter()  # episodes that groups of all steps went without, by reason

    def add(self, record: Mapping[str, Any]) -> None:
        """Add one record. Records without a step are ignored, null values are left out."""
        step = record.get("step")
        if not isinstance(step, int):
            return
        values = numbers({name: value for name, value in record.items() if name != "step"})
        training = {name for name in values if name != "time" and not name.startswith("eval/")}
        if training & self.rows.get(step, {}).keys():
            first = bisect.bisect_left(self.steps, step)
            for later in self.steps[first:]:
                removed = self.rows.pop(later)
                self.rejected.subtract(_by_reason(removed, REJECTED))
                self.missing.subtract(_by_reason(removed, MISSING))
            del self.steps[first:]
        if step not in self.rows:
            bisect.insort(self.steps, step)
        row = self.rows.setdefault(step, {})
        self.rejected.update(_by_reason(values, REJECTED))
        self.missing.update(_by_reason(values, MISSING))
        if "time" in row and not training:
            values.pop("time", None)
        row.update(values)

    def series(self, name: str) -> Series:
        """Return all values of a metric, by step."""
        return tuple((step, row[name]) for step in self.steps if name in (row := self.rows[step]))

    def latest(self, name: str) -> float | None:
        """Return the newest value of a metric."""
        return next((row[name] for step in reversed(self.steps) if name in (row := self.rows[step])), None)

    def score(self, name: str, step: int) -> str:
        """Return a value as text, of an evaluation with error and prompts: 0.412 ± 0.014 (n 1,319)."""
        return score(self.rows[step], name)

    def at_step(self, name: str, step: int) -> str:
        """Return a value as text, with its step: 0.412 ± 0.014 (n 1,319, step 40)."""
        return score(self.rows[step], name, f"step {step}")


def _by_reason(row: Row, prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): int(row[name]) for name in row if name.startswith(prefix)}
