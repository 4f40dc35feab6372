"""`asyncrl analyze`: any metrics of a run by name or glob, as statistics, values and curves."""

import csv
import difflib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.text import Text

from asyncrl.errors import RunError, RunNotUp
from asyncrl.results.archive import Archive, read_archive
from asyncrl.results.run_charts import began_at
from asyncrl.results.text_table import Table, terminal_table
from asyncrl.run.directory import find_run, write_text
from asyncrl.telemetry.curves import curve
from asyncrl.telemetry.history import Series
from asyncrl.telemetry.text import number, visible

MOST_ROWS = 20  # of the table of values on a terminal, evenly spread; a CSV file has all
MOST_COLUMNS = 4
CURVE_LINES = 12
NEAREST = 5


@dataclass(frozen=True, slots=True)
class Metric:
    """All values of one name."""

    axis: str  # step, or seconds since the run's first start
    series: Series


def analyze_run(run: Path | None, patterns: Sequence[str], to: Path | None) -> None:
    """Print what was asked for, or without patterns what there is; with `to` write it as .html or .csv too."""
    if to is not None and to.suffix not in FORMATS:
        raise RunError(f"--to {to}: the file's ending says what to write, allowed are {' and '.join(FORMATS)}")
    if to is not None and not patterns:
        raise RunError(f"--to {to}: found no metric to write; name some, such as 'reward/*', or '*' for all that there are")
    archive = _archive_of(run)
    known = metrics_of(archive)
    console = Console(highlight=False)
    if not patterns:
        for name, metric in known.items():
            console.print(
                Text(f"{visible(name)}  {len(metric.series)} values, last {number(metric.series[-1][1])}"), soft_wrap=True
            )
        return
    chosen = choose(known, patterns)
    for table in (statistics(chosen), *values(chosen)):
        console.print(terminal_table(table))
    for name, metric in chosen.items():
        for line in curve(
            f"{visible(name)} by {metric.axis}", metric.series, width=console.width, height=CURVE_LINES, style="cyan"
        ):
            console.print(line)
    if to is not None:
        write_text(to, FORMATS[to.suffix](archive, chosen))
        console.print(Text(str(to)), soft_wrap=True)


def _archive_of(run: Path | None) -> Archive:
    try:
        return read_archive(find_run(run))
    except RunNotUp as error:
        if run is None:
            raise
        raise RunNotUp(f"{error}; if `{run}` is a metric, name the run before it: `asyncrl analyze RUN {run}`") from error


def metrics_of(archive: Archive) -> dict[str, Metric]:
    """Learner metrics under their names, then those of a generator under `<its id>/<name>`."""
    found = {name: Metric("step", archive.series(name)) for name in archive.names}
    began = began_at(archive)
    for generator, rows in archive.generators.items():
        for name in sorted({name for row in rows for name in row if name not in ("time", "step")}):
            series = tuple((int(row["time"] - began), row[name]) for row in rows if {"time", name} <= row.keys())
            found[f"{generator}/{name}"] = Metric("s", series)
    return {name: metric for name, metric in found.items() if metric.series}


def choose(known: Mapping[str, Metric], patterns: Sequence[str]) -> dict[str, Metric]:
    """What matches, in the order of the patterns. Raises RunError for one that matches nothing, with the nearest names."""
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
    """One line for each metric."""
    return Table(
        ("metric", "values", "first", "last", "lowest", "highest", "mean", "std"), list(map(_statistics, chosen.items()))
    )


def _statistics(item: tuple[str, Metric]) -> tuple[str, ...]:
    name, metric = item
    numbers = [value for _, value in metric.series]
    mean = math.fsum(numbers) / len(numbers)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in numbers) / len(numbers))
    lowest, highest = (end(metric.series, key=lambda point: point[1]) for end in (min, max))
    spread = (f"{number(value)} at {at}" for at, value in (lowest, highest))
    return name, str(len(numbers)), number(numbers[0]), number(numbers[-1]), *spread, number(mean), number(std)


def values(chosen: Mapping[str, Metric]) -> Iterator[Table]:
    """Tables of at most `MOST_ROWS` evenly spread values; side by side stand metrics that were measured together."""
    together: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, metric in chosen.items():
        together.setdefault((metric.axis, tuple(at for at, _ in metric.series)), []).append(name)
    for (axis, places), names in together.items():
        for start in range(0, len(names), MOST_COLUMNS):
            columns = {name: dict(chosen[name].series) for name in names[start : start + MOST_COLUMNS]}
            yield Table(
                (axis, *columns), [(str(at), *(number(column[at]) for column in columns.values())) for at in _spread(places)]
            )


def _spread(places: Sequence[int]) -> list[int]:
    """First, last, and evenly between them."""
    last = len(places) - 1
    if last < MOST_ROWS:
        return list(places)
    return [places[round(index * last / (MOST_ROWS - 1))] for index in range(MOST_ROWS)]


def _csv(archive: Archive, chosen: Mapping[str, Metric]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("metric", "axis", "at", "value"))
    writer.writerows((name, metric.axis, at, value) for name, metric in chosen.items() for at, value in metric.series)
    return text.getvalue()


def _html(archive: Archive, chosen: Mapping[str, Metric]) -> str:
    from asyncrl.results.charts import lines
    from asyncrl.results.page import Section, render_page

    charts = [lines(name, {name: metric.series}, x=metric.axis) for name, metric in chosen.items()]
    return render_page(
        archive.name, "metrics of an asyncrl run", [Section(title="Metrics", tables=[statistics(chosen)], charts=charts)]
    )


# By the ending of the file.
FORMATS: Mapping[str, Callable[[Archive, Mapping[str, Metric]], str]] = {".html": _html, ".csv": _csv}
