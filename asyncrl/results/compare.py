"""`asyncrl compare`: results and time of several runs, and the settings in which they differ."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np

from asyncrl.algo.ranges import is_solved
from asyncrl.config.data_section import error_of
from asyncrl.errors import RunError
from asyncrl.evaluation import standard_error
from asyncrl.results.archive import Archive, read_archive
from asyncrl.results.charts import CURVES, Chart, Curve, by_minute, lines
from asyncrl.results.page import Section, Table, render_page
from asyncrl.run.directory import RunDirectory, find_run, write_text
from asyncrl.telemetry.base import sample_from
from asyncrl.telemetry.history import Points, Which, chosen, of_sets, set_of
from asyncrl.telemetry.jsonl import Tail
from asyncrl.telemetry.text import duration, number

# Plotted over minutes too: a run with fewer steps may need more time.
OVER_TIME = ("eval/reward_mean", "reward/mean")
OF_SEEDS = ("eval/accuracy", "eval/reward_mean", "reward/mean")
ALWAYS_DIFFERENT = frozenset({"run.name", "run.root"})


def compare_runs(runs: Sequence[Path], to: Path | None, also: Sequence[Table] = ()) -> list[Table]:
    """Return tables of results, differences and `also`; `to` gets a page with them and overlaid curves."""
    directories = {directory.path.resolve(): directory for directory in map(find_run, runs)}
    if len(directories) < 2 or len(directories) < len(runs):
        given = ", ".join(map(str, runs))
        raise RunError(
            f"compare needs at least two runs, each once, got {given}; give run directories or names"
        )
    archives = labelled([read_archive(directory) for directory in directories.values()])
    of_scores = gaps(archives)
    if to:
        write_text(to, compare_page(archives, [*of_scores, *also]))
    return [results(archives), *of_scores, *differences(archives), *also]


def compare_page(archives: Mapping[str, Archive], of_scores: Sequence[Table]) -> str:
    """Return tables, with those of scores, and overlaid curves as a page."""
    sections = [
        Section(title="Results", tables=[replace(results(archives), title=""), *of_scores]),
        Section(title="Curves", charts=overlaid(archives)),
        Section(title="Differences", tables=differences(archives)),
    ]
    return render_page(f"{len(archives)} runs", ", ".join(archives), sections)


def labelled(archives: Sequence[Archive]) -> dict[str, Archive]:
    """Return archives by the name of the run, or by its directory where two runs have the same name."""
    count = Counter(archive.name for archive in archives)
    names = (one.name if count[one.name] == 1 else str(one.directory.path) for one in archives)
    return dict(zip(names, archives, strict=True))


def results(archives: Mapping[str, Archive]) -> Table:
    """Return a table of results with one column for each run."""
    known = dict.fromkeys(name for one in archives.values() for name in one.names)
    scores = [name for wanted in SCORES for name in of_sets(wanted, known) or [wanted]]
    columns = [
        {
            "state": run.state,
            "step": f"{run.step} of {run.total_steps or '?'}",
            "wall time": duration(run.wall_s),
            "trained tokens": f"{run.history.total('tokens'):,.0f}",
            **{f"{name}, {of}": run.history.shown(name, of) for name in scores for of in get_args(Which)},
            "reward/mean, last tenth": _mean(run, "reward/mean", 10),
            "reward/mean, best": run.history.shown("reward/mean", "best"),
            "completions/length_mean, last tenth": _mean(run, "completions/length_mean", 10),
            "policy/entropy, last": run.history.shown("policy/entropy", "last"),
            "mismatch/ess, mean": _mean(run, "mismatch/ess"),
            "staleness/mean, mean": _mean(run, "staleness/mean"),
            "idle/learner, mean": _mean(run, "idle/learner"),
            "time/step in s, mean": _mean(run, "time/step"),
            "alarms": ", ".join(run.alarm_spans) or "none",
        }
        for run in archives.values()
    ]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    return Table(("", *archives), rows, "results")


# Scores, and how `evaluation.summarise` makes each from the reward of a sample.
SCORES: Mapping[str, Callable[[float], float]] = {
    "eval/accuracy": lambda reward: float(is_solved(reward)),
    "eval/reward_mean": float,
}
CHOICES: tuple[Which, ...] = ("last", "best")
CERTAIN = 2.0  # times the error: chance alone makes 19 of 20 differences smaller


# (prompt, rewards of its samples by their numbers) of each prompt of an evaluation, by its number.
Answered = Mapping[int, tuple[str, dict[int, float]]]


def gaps(archives: Mapping[str, Archive]) -> list[Table]:
    """Return a table with the differences of each two runs; none if no two were evaluated.

    If two runs answered the same prompts, they are compared prompt by prompt. What makes a prompt easy or
    hard for both then cancels out, and the error is smaller than that of two independent draws of prompts.

    Source: Miller 2024, Adding Error Bars to Evals (arXiv:2411.00640).
    """
    read, rows = cache(answered), []
    for (before, one), (after, other) in combinations(archives.items(), 2):
        both = [name for name in one.names if name in other.names]
        for name, score in {each: one for one in SCORES for each in of_sets(one, both)}.items():
            for which in CHOICES:
                steps = [(run, chosen(run.history.series(name), which)[0]) for run in (one, other)]
                files = (run.directory.evaluation(step, set_of(name)) for run, step in steps)
                pairs = paired(score, *map(read, files))
                first, second = (run.history.rows[step] for run, step in steps)
                errors = [row[error_of(name)] for row in (first, second) if error_of(name) in row]
                # As if the prompts of the two runs were drawn independently.
                error = math.hypot(*errors) if len(errors) == 2 else None
                gap, way = second[name] - first[name], "both scores, not in pairs"
                if len(pairs) > 1:
                    gap, error = float(np.mean(pairs)), standard_error(pairs)
                    way = f"{len(pairs):,} prompts in pairs"
                rows.append((f"{name}, {which}", f"{after} - {before}", *_judged(gap, error, way)))
    head = ("score", "runs", "difference", "error of", "larger than twice its error")
    return [Table(head, rows, "differences of evaluations")] if rows else []


def answered(path: Path) -> Answered:
    """Return what a file of all samples of an evaluation has; empty without one."""
    found: dict[int, tuple[str, dict[int, float]]] = {}
    for sample in map(sample_from, Tail(path)):
        if sample.kind == "eval":
            # An episode may be several records, of which the first begins with the prompt.
            _, rewards = found.setdefault(sample.prompt_number, (sample.prompt, {}))
            rewards.setdefault(sample.sample_number, sample.reward)
    return found


def paired(name: str, before: Answered, after: Answered) -> list[float]:
    """Return the difference of a score on each prompt that both runs answered; empty if prompts differ."""
    common = sorted(before.keys() & after.keys())
    if any(before[number][0] != after[number][0] for number in common):
        return []
    means = [
        [float(np.mean([SCORES[name](reward) for reward in run[one][1].values()])) for one in common]
        for run in (before, after)
    ]
    return [second - first for first, second in zip(*means, strict=True)]


def _judged(gap: float, error: float | None, way: str) -> tuple[str, str, str]:
    sign = "+" if gap > 0 else ""
    if error is None:
        return f"{sign}{number(gap)}", way, "unknown: a score has no error"
    verdict = "yes" if abs(gap) > CERTAIN * error else "no: it may be chance"
    return f"{sign}{number(gap)} ± {number(error, 2)}", way, verdict


def differences(archives: Mapping[str, Archive]) -> list[Table]:
    """Return tables of the settings and the software releases that are not the same in all runs."""
    settings = [dict(flat(archive.config)) for archive in archives.values()]
    software = [archive.starts[-1].versions if archive.starts else {} for archive in archives.values()]
    kinds = (("setting", settings, "settings that differ"), ("software", software, "releases that differ"))
    tables = []
    for kind, columns, title in kinds:
        names = dict.fromkeys(name for column in columns for name in column)
        rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
        if differing := [row for row in rows if len(set(row[1:])) > 1]:
            tables.append(Table((kind, *archives), differing, title))
    return tables


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as text) of a config; a list is one value."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.")
        elif name not in ALWAYS_DIFFERENT:
            yield name, str(value)


def overlaid(archives: Mapping[str, Archive]) -> list[Chart]:
    """Return charts with one curve for each run that has the metric."""
    charts, curves = [], dict[str, Curve]()
    known = dict.fromkeys(name for one in archives.values() for name in one.names)
    for curve in CURVES:
        for name in of_sets(curve.names[0], known):
            curves.setdefault(name, curve)  # a metric is in the first chart that names it
    for name, curve in curves.items():
        found = {label: archive.history.series(name) for label, archive in archives.items()}
        by_step = {label: series for label, series in found.items() if series}
        if by_step:
            charts.append(lines(f"{curve.title} ({name})", by_step, y=curve.y, log=curve.log))
        if by_step and curve.names[0] in OVER_TIME:
            by_time = {label: over_time(archives[label], name) for label in by_step}
            title, x = f"{curve.title} over time", "minutes since the first step"
            charts.append(lines(title, by_time, x=x, y=curve.y))
    return charts


def over_time(archive: Archive, name: str) -> Points:
    """Return (minutes since the end of the first step, value), so the time to load models does not count."""
    rows = [archive.history.rows[step] for step in archive.history.steps]
    # A run that ended in its first step may have been evaluated.
    times = [row["time"] for row in rows if {"time", "time/step"} <= row.keys()] or archive.history.times
    return by_minute(rows, name, min(times, default=0.0))


def _mean(run: Archive, name: str, parts: int = 1) -> str:
    """Return the mean over the last of so many equal parts of the steps, with the step where it begins."""
    values = [value for _, value in run.history.series(name)]
    last = values[len(values) - -(-len(values) // parts) :]
    return number(sum(last) / len(last)) if last else "-"


def over_seeds(runs: Sequence[tuple[str, RunDirectory]]) -> Table:
    """Return mean and standard error over seeds of metrics' last values in finished runs, by their values."""
    groups: dict[str, list[dict[str, float]]] = {values: [] for values, _ in runs}
    begun = Counter(values for values, _ in runs)
    for values, directory in runs:
        if directory.config.exists() and (archive := read_archive(directory)).state == "finished":
            groups[values].append({name: archive.history.series(name)[-1][1] for name in archive.names})
    known = dict.fromkeys(name for found in groups.values() for one in found for name in one)
    names = [name for wanted in OF_SEEDS for name in of_sets(wanted, known) or [wanted]]
    rows = []
    for values, found in groups.items():
        count = f"{len(found)} of {begun[values]}" if len(found) < begun[values] else str(len(found))
        row = [values or "all", count]
        for name in names:
            last = [one[name] for one in found if name in one]
            row.append(f"{number(statistics.fmean(last))} ± {number(standard_error(last))}" if last else "-")
        rows.append(row)
    title = "last values of finished runs, mean ± standard error over seeds"
    return Table(("values", "runs", *names), rows, title)
