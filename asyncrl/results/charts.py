"""The charts of pages: which metrics are in each, and how it is drawn. A chart without values is left out."""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from asyncrl.extras import from_extra
from asyncrl.results.archive import Archive
from asyncrl.telemetry.history import REJECTED, Points, Row, Series, growth_share, of_sets, thinned
from asyncrl.telemetry.text import visible

MOST_GENERATORS = 8  # generators with their own curve: those that waited most
BANDS = ("short", "medium", "long")  # the same as in `algo.metrics`, which needs torch
LENGTH_REJECTED = "groups/length_rejected_"
MOST_POINTS = 1500  # points of one curve: more than a screen has pixels for
FEW_POINTS = 40  # curves with at most this many points get markers
COLOURS = ("#1f5fbf", "#d9730d", "#2a9d62", "#c03a5b", "#7a56c2", "#8a6d3b", "#0f8b8d", "#6b7280")
GRID = "#e6e9ed"


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure and its title, which stands outside the figure because a legend may need several rows."""

    title: str
    figure: Any  # a plotly figure


@dataclass(frozen=True, slots=True)
class Curve:
    """The metrics of a chart over steps."""

    title: str
    names: tuple[str, ...]  # metrics or globs; `compare` uses the first
    y: str = ""
    log: bool = False


CURVES = (
    Curve("Reward", ("reward/mean", "reward/*/mean")),
    Curve("Held-out reward", ("eval/reward_mean", "eval/accuracy", "eval/pass@*", "eval/maj@*")),
    Curve(
        "Response length", ("completions/length_mean", "completions/length_max", "eval/length_mean"), "tokens"
    ),
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
    Curve(
        "Clipped",
        (
            "policy/clipped_high",
            "policy/clipped_low",
            "policy/dual_clipped",
            "policy/left_out",
            "weight/truncated",
            "weight/rejected",
        ),
        "share of the tokens",
    ),
    Curve("Groups without signal", ("group/zero_variance",), "share"),
    Curve("KL to the reference", ("policy/kl_reference", "reference/k3"), "nats"),
    Curve("Critic", ("critic/explained_variance",), "share"),
    Curve("Speed of the learner", ("perf/learner_tokens_per_s",), "tokens/s"),
    Curve("Model FLOPs utilisation of the learner", ("perf/mfu",), "share"),
    Curve("Memory of the learner's GPUs", ("memory/allocated_bytes/*", "memory/planned_bytes/*"), "bytes"),
    Curve("Transfer of a version to its last generator", ("weights/transfer_gb_per_s",), "GB/s"),
)

AGE_PARTS = Curve("Mean age of a token", ("staleness/in_flight", "staleness/in_queue"), "steps")
AGE = Curve("Age of a token", ("staleness/max", "staleness/mean"), "steps")
TOO_OLD = Curve(
    "Too old, and out of the loss",
    (
        "staleness/masked_share",
        *(f"staleness/masked_share/{band}" for band in BANDS),
        "staleness/masked_share/turn/*",
    ),
    "share of the tokens",
)
STALENESS = (AGE_PARTS, AGE, TOO_OLD)


def draw_curves(archive: Archive, curves: Iterable[Curve]) -> list[Chart]:
    """Draw each curve that has values, such as those of `CURVES`."""
    charts = []
    shown: set[str] = set()  # a metric is in the first chart that names it
    for curve in curves:
        found: dict[str, Series] = {}
        for name, series in _series(archive, curve.names, but=shown).items():
            shown.add(name)
            # A series that repeats an earlier one is left out: the only part of a reward equals the reward,
            # pass@1 the accuracy, and that the mean of rewards of 0 and 1. Constant series, as zeros, are
            # shown for each metric.
            if series not in found.values() or len({value for _, value in series}) == 1:
                found[name] = series
        if curve.log:
            found = {name: tuple(point for point in points if point[1] > 0) for name, points in found.items()}
        if any(found.values()):
            charts.append(lines(curve.title, found, y=curve.y, log=curve.log))
    return charts


def staleness_charts(archive: Archive) -> list[Chart]:
    """Draw the age of tokens when they were trained on, and where that age came from."""
    histograms = {where.replace("_", " "): _histogram(archive, where) for where in ("in_flight", "in_queue")}
    charts = []
    if any(histograms.values()):
        charts.append(bars("Steps that a token spent", histograms, x="steps", y="share of the tokens"))
    for draw, curve in ((areas, AGE_PARTS), (lines, AGE), (lines, TOO_OLD)):
        if found := _series(archive, curve.names):
            charts.append(draw(curve.title, found, y=curve.y))
    return charts


def dropped_charts(archive: Archive) -> list[Chart]:
    """Draw lengths of dropped and trained responses: if dropped ones are longer, responses get shorter."""
    charts = []
    # (number of groups, mean length) of what was trained, and of each reason to reject.
    kinds = {"trained": ("groups/trained", "completions/length_mean")}
    for name in archive.names:
        if name.startswith(REJECTED):
            kinds[name.removeprefix(REJECTED)] = (name, name.replace(REJECTED, LENGTH_REJECTED))
    if len(kinds) > 1:
        counts = {kind: _total(archive, groups) for kind, (groups, _) in kinds.items()}
        charts.append(bars("Groups", {"groups": counts}, y="groups"))
        lengths = {kind: _mean(archive, length, groups) for kind, (groups, length) in kinds.items()}
        if known := {kind: length for kind, length in lengths.items() if length is not None}:
            charts.append(bars("Mean length of their responses", {"length": known}, y="tokens"))
    by_band = {
        name: {band: mean for band in BANDS if (mean := _mean_of_band(archive, name, band)) is not None}
        for name in ("staleness/masked_share", "policy/left_out", "weight/zero")
    }
    if any(share for shares in by_band.values() for share in shares.values()):
        title = "Tokens out of the loss, by length of the response"
        charts.append(bars(title, by_band, y="share of them, mean over steps"))
    if archive.series("tokens/short"):
        trained = {"trained": {band: _total(archive, f"tokens/{band}") for band in BANDS}}
        charts.append(bars("Trained tokens, by length of the response", trained, y="tokens"))
    return charts


def waiting_charts(archive: Archive) -> list[Chart]:
    """Draw the shares of time that each side waited: the bottleneck is the side that never waits."""
    if not archive.history.times:
        return []
    steps = [archive.history.rows[step] for step in archive.history.steps]
    idle = {"learner": by_minute(steps, "idle/learner", archive.began_at)} | _of_generators(archive, "idle_s")
    title, y = "Waiting: learner for groups, generators for tickets", "share of the time"
    charts = [lines(title, idle, x="minutes", y=y)]
    # `time/sampling_s` and `time/reward_s` are measured per group in the generators, not per step.
    names = [name for name in archive.names if name.startswith("time/")]
    phases = {name.removeprefix("time/"): name for name in names if not name.endswith(("_s", "/step"))}
    if phases:
        seconds = {phase: archive.series(name) for phase, name in phases.items()}
        charts.append(areas("A step of the learner", seconds, y="s"))
    if stalled := _of_generators(archive, "stalled_s"):
        title = "Generators stalled: paused for new weights, or waiting for them"
        charts.append(lines(title, stalled, x="minutes", y=y))
    speed = {
        generator: by_minute(rows, "tokens_per_s", archive.began_at)
        for generator, rows in list(archive.generators.items())[:MOST_GENERATORS]
        if rows
    }
    if speed:
        charts.append(lines("Sampling", speed, x="minutes", y="tokens/s"))
    return charts


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


def _series(archive: Archive, patterns: Sequence[str], *, but: Collection[str] = ()) -> dict[str, Series]:
    """Return the series of all metrics that match, in the order of the patterns, without those in `but`."""
    names = [name for pattern in patterns for name in of_sets(pattern, archive.names)]
    return {name: archive.series(name) for name in names if name not in but}


def _histogram(archive: Archive, where: str) -> Mapping[str, float]:
    """Return the mean of `staleness/<where>/<steps>`; a step without a bin had no token of that age."""
    prefix = f"staleness/{where}/"
    bins = sorted(int(name.removeprefix(prefix)) for name in archive.names if name.startswith(prefix))
    measured = len(archive.series(f"{prefix}0"))
    return {str(steps): _total(archive, f"{prefix}{steps}") / measured for steps in bins}


def _total(archive: Archive, name: str) -> float:
    return sum(value for _, value in archive.series(name))


def _mean(archive: Archive, name: str, weight: str) -> float | None:
    """Return the weighted mean over the steps; None without weight."""
    weights = dict(archive.series(weight))
    pairs = [(value, weights.get(step, 0.0)) for step, value in archive.series(name)]
    total = sum(one for _, one in pairs)
    return sum(value * one for value, one in pairs) / total if total else None


def _mean_of_band(archive: Archive, name: str, band: str) -> float | None:
    """Return the mean over the steps that had tokens in responses of that length; None without such steps."""
    trained = dict(archive.series(f"tokens/{band}"))
    shares = [share for step, share in archive.series(f"{name}/{band}") if share or trained.get(step)]
    return sum(shares) / len(shares) if shares else None


def lines(
    title: str, series: Mapping[str, Points], *, x: str = "step", y: str = "", log: bool = False
) -> Chart:
    """Draw a curve for each name; `x` and `y` name the axes."""
    figure = _figure(x, y)
    for index, (name, points) in enumerate(series.items()):
        shown = thinned(points, MOST_POINTS)
        figure.add_scatter(
            x=[at for at, _ in shown],
            y=[value for _, value in shown],
            name=_label(name),
            mode="lines" if len(shown) > FEW_POINTS else "lines+markers",
            line={"color": COLOURS[index % len(COLOURS)], "width": 1.8},
            marker={"size": 5},
        )
    if log:
        figure.update_yaxes(type="log", exponentformat="power")
    elif all(value >= 0 for points in series.values() for _, value in points):
        figure.update_yaxes(rangemode="nonnegative")
    return Chart(title, figure)


def areas(title: str, series: Mapping[str, Points], *, x: str = "step", y: str = "") -> Chart:
    """Draw parts of a whole as stacked areas; the axis cuts off few far larger sums, as of the first step."""
    chart = lines(title, series, x=x, y=y)
    chart.figure.update_traces(stackgroup="all", mode="lines", line={"width": 0.5})
    sums: dict[float, float] = {}
    for points in series.values():
        for at, value in points:
            sums[at] = sums.get(at, 0.0) + value
    usual = sorted(sums.values())[int(0.95 * (len(sums) - 1))] if sums else 0.0
    if usual and max(sums.values()) > 4 * usual:
        chart.figure.update_yaxes(range=[0, 2 * usual])
    return chart


def bars(title: str, series: Mapping[str, Mapping[str, float]], *, x: str = "", y: str = "") -> Chart:
    """Draw grouped bars: for each name a value by category."""
    figure = _figure(x, y)
    for index, (name, values) in enumerate(series.items()):
        marker = {"color": COLOURS[index % len(COLOURS)], "line": {"width": 0}}
        categories = list(map(_label, values))
        figure.add_bar(x=categories, y=list(values.values()), name=_label(name), marker=marker)
    figure.update_xaxes(type="category")
    figure.update_layout(bargap=0.35, bargroupgap=0.08)
    return Chart(title, figure)


def _label(name: str) -> str:
    """Return a label without tags, some of which plotly would read as markup."""
    return visible(name).replace("&", "&amp;").replace("<", "&lt;")


def _figure(x: str, y: str) -> Any:
    with from_extra("report"):
        import plotly.graph_objects as go
    colours = dict.fromkeys(("gridcolor", "linecolor", "zerolinecolor"), GRID)
    axis = colours | {"automargin": True, "title": {"standoff": 6}}
    figure = go.Figure()
    figure.update_layout(
        template="none",
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#1c2430"},
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        showlegend=True,
        hovermode="x unified",
        xaxis=axis,
        yaxis=axis,
    )
    figure.update_xaxes(title_text=x)
    return figure.update_yaxes(title_text=y)
