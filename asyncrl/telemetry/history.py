"""Metrics of a run by step, and as series."""

import bisect
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from asyncrl.config.data_section import error_of
from asyncrl.telemetry.text import number

REJECTED = "groups/rejected_"
MISSING = "episodes/missing/"
# Logged after some steps, perhaps again. TRL writes its counts also with evaluations, and at the end.
LATER = ("eval/", "checkpoint/", "time/checkpoint", "train/epoch", "train/num_input", "train/total_flos")
Row = dict[str, float]
Which = Literal["first", "last", "best"]
Series = tuple[tuple[int, float], ...]  # (step, value), ascending
Points = Sequence[tuple[float, float]]  # (place, value), ascending; a `Series` is one


def thinned(points: Points, most: int) -> Points:
    """Return at most `most` points: each is the mean of neighbouring points, at the place of the last one."""
    size = -(-len(points) // most)
    if size <= 1:
        return points
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(run[-1][0], sum(value for _, value in run) / len(run)) for run in runs]


def chosen(series: Series, of: Which) -> tuple[int, float]:
    """Return a point of a series that has one; the best has the highest value, and is the first of equals."""
    if of == "best":
        return max(series, key=lambda point: (point[1], -point[0]))
    return series[0 if of == "first" else -1]


def of_sets(wanted: str, names: Iterable[str]) -> list[str]:
    """Return the names that fit a name or glob; `eval/accuracy` also fits `eval/x/accuracy` of a set x."""
    is_eval, metric = wanted.startswith("eval/"), wanted.removeprefix("eval/")
    globs = (wanted, f"eval/*/{metric}") if is_eval else (wanted,)
    fitting = (name for name in names if any(fnmatchcase(name, glob) for glob in globs))
    return [name for name in fitting if not (is_eval and "/se/" in name)]


def set_of(name: str) -> str:
    """Return the set in the name of a metric of an evaluation; empty if there is only one."""
    return name.removeprefix("eval/").rpartition("/")[0]


def score(row: Mapping[str, float], name: str, *notes: str) -> str:
    """Return a metric of `row` as text: its value, `±` and its standard error, (number of prompts, notes).

    For `eval/accuracy` these are `eval/se/accuracy` and `eval/prompts`, if the row has them.
    """
    error, prompts = row.get(error_of(name)), row.get(f"{name.rpartition('/')[0]}/prompts")
    known = ([f"n {prompts:,.0f}"] if prompts is not None else []) + [*notes]
    spread = f" ± {number(error, 2)}" if error is not None else ""
    return f"{number(row[name])}{spread}" + (f" ({', '.join(known)})" if known else "")


def numbers(record: Mapping[str, Any]) -> Row:
    """Return the numeric values of a record. All records share the texts of their names."""
    return {sys.intern(name): float(value) for name, value in record.items() if type(value) in (int, float)}


def growth(before: Row, now: Row, name: str) -> float:
    """Return the growth of a counter between two lines of a generator. It starts from 0 at a restart."""
    goes_on = now.get("alive_s", 0.0) > before.get("alive_s", 0.0)
    return now.get(name, 0.0) - (before.get(name, 0.0) if goes_on else 0.0)


def growth_share(before: Row, now: Row, name: str) -> float | None:
    """Return the growth of a counter of seconds as a share of the time between two lines; None if unknown."""
    if "alive_s" not in now:
        return None
    alive_s, counted_s = growth(before, now, "alive_s"), growth(before, now, name)
    return min(1.0, max(0.0, counted_s / alive_s)) if alive_s > 0 else None


class History:
    """Metrics by step. A step that is logged again, after a resume, replaces that step and all later ones.

    An evaluation may be logged steps later: `eval/` metrics are added to their step and replace no other.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.names: dict[str, None] = {}  # of the metrics in `rows`, in the order of their first values
        self.steps: list[int] = []  # of the rows, ascending: the dashboard often asks for the newest values
        self.times: list[float] = []  # Unix seconds of all records, also of steps that a resume repeated
        self.rejected: Counter[str] = Counter()  # groups rejected in all steps, by reason
        self.missing: Counter[str] = Counter()  # episodes that groups of all steps went without, by reason

    def add(self, record: Mapping[str, Any]) -> None:
        """Add one record. Records without a step are ignored, null values are left out."""
        step = record.get("step")
        if not isinstance(step, int):
            return
        values = numbers({name: value for name, value in record.items() if name != "step"})
        self.times += [values["time"]] if "time" in values else []
        training = {name for name in values if name != "time" and not name.startswith(LATER)}
        if training & self.rows.get(step, {}).keys():
            first = bisect.bisect_left(self.steps, step)
            for later in self.steps[first:]:
                removed = self.rows.pop(later)
                self.rejected.subtract(_by_reason(removed, REJECTED))
                self.missing.subtract(_by_reason(removed, MISSING))
            del self.steps[first:]
            left = {name for row in self.rows.values() for name in row}
            self.names = {name: None for name in self.names if name in left}
        if step not in self.rows:
            bisect.insort(self.steps, step)
        row = self.rows.setdefault(step, {})
        self.rejected.update(_by_reason(values, REJECTED))
        self.missing.update(_by_reason(values, MISSING))
        if "time" in row and not training:
            values.pop("time", None)
        row.update(values)
        self.names |= dict.fromkeys(values)

    def series(self, name: str) -> Series:
        """Return all (step, value) pairs of a metric."""
        return tuple((step, row[name]) for step in self.steps if name in (row := self.rows[step]))

    def total(self, name: str) -> float:
        return sum(value for _, value in self.series(name))

    def latest(self, name: str) -> float | None:
        return next((row[name] for step in reversed(self.steps) if name in (row := self.rows[step])), None)

    def shown(self, name: str, of: Which, *, until: float = math.inf) -> str:
        """Return a value up to a step as text: 0.412 ± 0.014 (n 1,319, step 40); `-` if there is none."""
        if not (series := tuple(point for point in self.series(name) if point[0] <= until)):
            return "-"
        step, _ = chosen(series, of)
        return score(self.rows[step], name, f"step {step}")


def _by_reason(row: Row, prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): int(row[name]) for name in row if name.startswith(prefix)}
