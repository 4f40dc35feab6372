"""`asyncrl analyze`: metrics of a run, chosen by name or glob, as statistics, tables of values and files."""

import csv
import difflib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from asyncrl.errors import RunError, RunNotUp
from asyncrl.results.archive import Archive, read_archive
from asyncrl.results.charts import lines
from asyncrl.results.page import Section, Table, render_page
from asyncrl.run.directory import find_run, write_text
from asyncrl.telemetry.history import Series
from asyncrl.telemetry.text import number

MOST_ROWS = 20  # rows of a table of values on a terminal, evenly spread; a CSV file has all values
MOST_COLUMNS = 4
NEAREST = 5


@dataclass(frozen=True, slots=True)
class Metric:
    """All values of one metric."""

    axis: str  # what the values are plotted over: "step", or "s" for seconds since the first start of the run
    series: Series


def analyze_run(run: Path | None, patterns: Sequence[str], to: Path | None) -> dict[str, Metric]:
    """Return the metrics that match, without patterns all. With `to`, also write them as .html or .csv."""
    if to is not None and to.suffix not in FORMATS:
        raise RunError(f"--to {to}: the file's ending is its format, allowed are {' and '.join(FORMATS)}")
    if to is not None and not patterns:
        raise RunError(f"--to {to}: found no metric to write; name some, such as 'reward/*', or '*' for all")
    try:
        archive = read_archive(find_run(run))
    except RunNotUp as error:
        if run is None:
            raise
        hint = f"if `{run}` is a metric, name the run before it: `asyncrl analyze RUN {run}`"
        raise RunNotUp(f"{error}; {hint}") from error
    known = metrics_of(archive)
    chosen = choose(known, patterns) if patterns else known
    if to is not None:
        write_text(to, FORMATS[to.suffix](archive, chosen))
    return chosen


def metrics_of(archive: Archive) -> dict[str, Metric]:
    """Return learner metrics by name, then metrics of generators as `<generator id>/<name>`."""
    found = {name: Metric("step", archive.series(name)) for name in archive.names}
    for generator, rows in archive.generators.items():
        timed = [(int(row["time"] - archive.began_at), row) for row in rows if "time" in row]
        for name in sorted({name for _, row in timed for name in row} - {"time", "step"}):
            series = tuple((seconds, row[name]) for seconds, row in timed if name in row)
            found[f"{generator}/{name}"] = Metric("s", series)
    return {name: metric for name, metric in found.items() if metric.series}


def choose(known: Mapping[str, Metric], patterns: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics that match, in the order of the patterns. A pattern without any raises RunError."""
    chosen: dict[str, Metric] = {}
    for pattern in patterns:
        names = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
        if not names:
            nearest = difflib.get_close_matches(pattern, known, NEAREST, 0.4)
            hint = f"the nearest are {', '.join(nearest)}" if nearest else "none is near"
            raise RunError(f"no metric `{pattern}`; {hint}; `asyncrl analyze RUN` lists all {len(known)}")
        chosen |= {name: known[name] for name in names}
    return chosen


def statistics(chosen: Mapping[str, Metric]) -> Table:
    """Return a table with one row for each metric."""
    rows = []
    for name, metric in chosen.items():
        numbers = [value for _, value in metric.series]
        mean = math.fsum(numbers) / len(numbers)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in numbers) / len(numbers))
        ends = (end(metric.series, key=lambda point: point[1]) for end in (min, max))
        spread = [f"{number(value)} at {at}" for at, value in ends]
        count, first, last = str(len(numbers)), number(numbers[0]), number(numbers[-1])
        rows.append((name, count, first, last, *spread, number(mean), number(std)))
    return Table(("metric", "values", "first", "last", "lowest", "highest", "mean", "std"), rows)


def values(chosen: Mapping[str, Metric]) -> Iterator[Table]:
    """Yield tables of at most `MOST_ROWS` evenly spread values, for metrics measured at the same places."""
    together: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, metric in chosen.items():
        together.setdefault((metric.axis, tuple(at for at, _ in metric.series)), []).append(name)
    for (axis, places), names in together.items():
        last = len(places) - 1
        if last >= MOST_ROWS:
            places = tuple(places[round(index * last / (MOST_ROWS - 1))] for index in range(MOST_ROWS))
        for start in range(0, len(names), MOST_COLUMNS):
            columns = {name: dict(chosen[name].series) for name in names[start : start + MOST_COLUMNS]}
            rows = [(str(at), *(number(column[at]) for column in columns.values())) for at in places]
            yield Table((axis, *columns), rows)


def _csv(archive: Archive, chosen: Mapping[str, Metric]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("metric", "axis", "at", "value"))
    writer.writerows(
        (name, metric.axis, at, value) for name, metric in chosen.items() for at, value in metric.series
    )
    return text.getvalue()


def _html(archive: Archive, chosen: Mapping[str, Metric]) -> str:
    charts = [lines(name, {name: metric.series}, x=metric.axis) for name, metric in chosen.items()]
    section = Section(title="Metrics", tables=[statistics(chosen)], charts=charts)
    return render_page(archive.name, "metrics of an asyncrl run", [section])


# Writers by the ending of the file.
FORMATS: Mapping[str, Callable[[Archive, Mapping[str, Metric]], str]] = {".html": _html, ".csv": _csv}
