"""The charts of pages: which metrics are in each, and how it is drawn. A chart without values is left out."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from asyncrl.results.archive import Archive
from asyncrl.telemetry.history import Points, Row, Series, growth_share, of_sets, thinned
from asyncrl.telemetry.text import visible

MOST_GENERATORS = 8  # generators with their own curve: those that waited most
BANDS = ("short", "medium", "long")  # the same as in `algo.metrics`, which needs torch
MOST_POINTS = 1500  # points of one curve: more than a screen has pixels for
FEW_POINTS = 40  # curves with at most this many points get markers
COLOURS = ("#1f5fbf", "#d9730d", "#2a9d62", "#c03a5b", "#7a56c2", "#8a6d3b", "#0f8b8d", "#6b7280")
GRID = "#e6e9ed"


# `data` and `layout` of plotly, and the `title`: it stands outside because a legend may need several rows.
Chart = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """The metrics of a chart over steps."""

    title: str
    names: tuple[str, ...]  # metrics or globs; `compare` uses the first
    y: str = ""
    log: bool = False


CLIPPED = (
    "policy/clipped_high", "policy/clipped_low", "policy/dual_clipped", "policy/left_out", "weight/truncated",
    "weight/rejected",
)  # fmt: skip
LENGTHS = ("completions/length_mean", "completions/length_max", "eval/length_mean")
CURVES = (
    Curve("Reward", ("reward/mean", "reward/*/mean")),
    Curve("Held-out reward", ("eval/reward_mean", "eval/accuracy", "eval/pass@*", "eval/maj@*")),
    Curve("Response length", LENGTHS, "tokens"),
    Curve("Cut off, and masked for it", ("completions/truncated_share", "completions/masked_share"), "share"),
    Curve("Turns of an episode", ("episodes/turns_mean", "episodes/turns_max", "episodes/sequences_mean")),
    Curve("Endings of episodes", ("episodes/ended_share/*",), "share"),
    Curve("Tool calls of an episode", ("environment/tools/*", "environment/observations/cut")),
    Curve("Seconds of an episode", ("environment/model_s", "environment/environment_s"), "s"),
    Curve("How turns continue their conversation", ("environment/chat/*",), "turns of an episode"),
    Curve("Episodes that failed and are missing", ("episodes/missing/*",)),
    Curve("Environment", ("environment/*",)),
    Curve("Generator against learner, by turn", ("mismatch/turn/*",), "nats", log=True),
    Curve("Entropy", ("policy/entropy",), "nats"),
    Curve("Gradient norm, before clipping", ("policy/grad_norm", "critic/grad_norm")),
    Curve("Generator against learner", ("mismatch/k3", "weights/probe_max"), "nats", log=True),
    Curve("Effective share of the tokens", ("mismatch/ess", "policy/ess"), "share"),
    Curve("Clipped", CLIPPED, "share of the tokens"),
    Curve("Groups without signal", ("group/zero_variance",), "share"),
    Curve("KL to the reference", ("policy/kl_reference", "reference/k3"), "nats"),
    Curve("Critic", ("critic/explained_variance",), "share"),
    Curve("Speed of the learner", ("perf/learner_tokens_per_s",), "tokens/s"),
    Curve("Model FLOPs utilisation of the learner", ("perf/mfu",), "share"),
    Curve("Memory of the learner's GPUs", ("memory/allocated_bytes/*", "memory/planned_bytes/*"), "bytes"),
    Curve("Transfer of a version to its last generator", ("weights/transfer_gb_per_s",), "GB/s"),
)

MASKED = ("staleness/masked_share", "staleness/masked_share/*")
STALENESS = (
    Curve("Mean age of a token", ("staleness/in_flight", "staleness/in_queue"), "steps"),
    Curve("Age of a token", ("staleness/max", "staleness/mean"), "steps"),
    Curve("Too old, and out of the loss", MASKED, "share of the tokens"),
)


def draw_curves(archive: Archive, curves: Iterable[Curve]) -> list[Chart]:
    """Draw each curve that has values, such as those of `CURVES`."""
    charts = []
    shown: set[str] = set()  # a metric is in the first chart that names it
    for curve in curves:
        found: dict[str, Series] = {}
        names = [name for wanted in curve.names for name in of_sets(wanted, archive.names)]
        for name in [name for name in dict.fromkeys(names) if name not in shown]:
            series = archive.history.series(name)
            shown.add(name)
            # A series equal to an earlier one is left out: the only part of a reward is the reward, pass@1
            # the accuracy, and that the mean of 0/1 rewards. Constant series, as zeros, are shown per metric.
            if series not in found.values() or len({value for _, value in series}) == 1:
                found[name] = series
        if curve.log:
            found = {name: tuple(point for point in points if point[1] > 0) for name, points in found.items()}
        if any(found.values()):
            charts.append(lines(curve.title, found, y=curve.y, log=curve.log))
    return charts


def waiting_charts(archive: Archive) -> list[Chart]:
    """Draw the shares of time that each side waited: the bottleneck is the side that never waits."""
    if not archive.history.times:
        return []
    steps = [archive.history.rows[step] for step in archive.history.steps]
    idle = {"learner": by_minute(steps, "idle/learner", archive.began_at)} | _of_generators(archive, "idle_s")
    # `time/sampling_s` and `time/reward_s` are measured per group in the generators, not per step.
    phases = {name.removeprefix("time/"): name for name in archive.names if name.startswith("time/")}
    speed = {
        generator: by_minute(rows, "tokens_per_s", archive.began_at)
        for generator, rows in list(archive.generators.items())[:MOST_GENERATORS]
        if rows
    }
    seconds = {
        phase: archive.history.series(name)
        for phase, name in phases.items()
        if not phase.endswith("_s") and phase != "step"
    }
    stalled, of_time = _of_generators(archive, "stalled_s"), "share of the time"
    charts: Sequence[tuple[str, Mapping[str, Points], str, str]] = (
        ("Waiting: learner for groups, generators for tickets", idle, "minutes", of_time),
        ("A step of the learner", seconds, "step", "s"),
        ("Generators stalled: paused for new weights, or waiting for them", stalled, "minutes", of_time),
        ("Sampling", speed, "minutes", "tokens/s"),
    )
    return [lines(title, series, x=x, y=y) for title, series, x, y in charts if series]


def by_minute(rows: Iterable[Row], name: str, began_at: float) -> Points:
    """Return (minutes since `began_at`, value) of the rows that have the metric."""
    return [((row["time"] - began_at) / 60, row[name]) for row in rows if {"time", name} <= row.keys()]


def growth_shares(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """Return (Unix seconds, `growth_share` since the line before) for each line that has the counter."""
    found = [
        (now["time"], growth_share(before, now, name))
        for before, now in pairwise(rows)
        if {name, "time"} <= now.keys()
    ]
    return [(at, share) for at, share in found if share is not None]


def _of_generators(archive: Archive, name: str) -> dict[str, Points]:
    """Return `growth_shares` by minute of the generators with the largest ones."""
    shares = {generator: growth_shares(rows, name) for generator, rows in archive.generators.items()}
    sums = {generator: sum(share for _, share in found) for generator, found in shares.items() if found}
    return {
        generator: [((at - archive.began_at) / 60, share) for at, share in shares[generator]]
        for generator in sorted(heapq.nlargest(MOST_GENERATORS, sums, key=sums.__getitem__))
    }


def lines(
    title: str, series: Mapping[str, Points], *, x: str = "step", y: str = "", log: bool = False
) -> Chart:
    """Draw a curve for each name; `x` and `y` name the axes."""
    curves = []
    for index, (name, points) in enumerate(series.items()):
        shown = thinned(points, MOST_POINTS)
        curves.append(
            {
                "type": "scatter",
                "x": [at for at, _ in shown],
                "y": [value for _, value in shown],
                # Without tags, some of which plotly would read as markup.
                "name": visible(name).replace("&", "&amp;").replace("<", "&lt;"),
                "mode": "lines" if len(shown) > FEW_POINTS else "lines+markers",
                "line": {"color": COLOURS[index % len(COLOURS)], "width": 1.8},
                "marker": {"size": 5},
            }
        )
    axis = dict.fromkeys(("gridcolor", "linecolor", "zerolinecolor"), GRID) | {"automargin": True}
    scale = {"type": "log", "exponentformat": "power"} if log else {}
    if not log and all(value >= 0 for points in series.values() for _, value in points):
        scale = {"rangemode": "nonnegative"}
    layout = {
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1c2430"},
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        "showlegend": True,
        "hovermode": "x unified",
        "xaxis": axis | {"title": {"text": x, "standoff": 6}},
        "yaxis": axis | scale | {"title": {"text": y, "standoff": 6}},
    }
    return {"title": title, "data": curves, "layout": layout}
