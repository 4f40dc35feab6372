"""Results of runs that differ in their seed only."""

import statistics
from collections.abc import Sequence

from asyncrl.evaluation import standard_error
from asyncrl.results.archive import read_archive
from asyncrl.results.page import Table
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.text import number

METRICS = ("eval/accuracy", "eval/reward_mean", "reward/mean")


def over_seeds(runs: Sequence[tuple[str, RunDirectory]]) -> Table:
    """Return the mean and the standard error over seeds of each metric's last value, by the runs' values."""
    groups: dict[str, list[dict[str, float]]] = {}
    for values, directory in runs:
        archive = read_archive(directory)
        last = {name: series[-1][1] for name in METRICS if (series := archive.series(name))}
        groups.setdefault(values, []).append(last)
    rows = [
        (
            values or "all",
            str(len(found)),
            *(_mean([one[name] for one in found if name in one]) for name in METRICS),
        )
        for values, found in groups.items()
    ]
    return Table(("values", "runs", *METRICS), rows, "last values, mean ± standard error over seeds")


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{number(statistics.fmean(values))} ± {number(standard_error(values))}"
