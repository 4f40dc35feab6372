"""The charts of a run and the metrics in each. A chart without values is left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from asyncrl.results.archive import Archive
from asyncrl.results.charts import Chart, areas, bars, lines
from asyncrl.telemetry.history import REJECTED, Points, Row, Series

MOST_GENERATORS = 8  # generators with their own curve: those that waited most
BANDS = ("short", "medium", "long")  # the same as in `algo.metrics`, which needs torch
LENGTH_REJECTED = "groups/length_rejected_"


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart over steps."""

    title: str
    names: tuple[str, ...]  # metrics or globs; `compare` uses the first
    y: str = ""
    log: bool = False


CURVES = (
    Curve("Reward", ("reward/mean", "reward/*/mean")),
    Curve("Held-out accuracy", ("eval/accuracy", "eval/pass@*", "eval/maj@*"), "share"),
    Curve(
        "Response length", ("completions/length_mean", "completions/length_max", "eval/length_mean"), "tokens"
    ),
    Curve("Cut off, and masked for it", ("completions/truncated_share", "completions/masked_share"), "share"),
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
)

AGE_PARTS = Curve("Mean age of a token", ("staleness/in_flight", "staleness/in_queue"), "steps")
AGE = Curve("Age of a token", ("staleness/max", "staleness/mean"), "steps")
TOO_OLD = Curve(
    "Too old, and out of the loss",
    ("staleness/masked_share", *(f"staleness/masked_share/{band}" for band in BANDS)),
    "share of the tokens",
)
STALENESS = (AGE_PARTS, AGE, TOO_OLD)


def learning_charts(archive: Archive) -> list[Chart]:
    """Reward, held-out accuracy, lengths, and the metrics that announce a failing run."""
    charts = []
    for curve in CURVES:
        found: dict[str, Series] = {}
        for name, series in _series(archive, curve.names).items():
            # A series that repeats an earlier one is left out: the only part of a reward is the reward,
            # pass@1 is the accuracy. Constant series, such as zeros, are shown for each metric.
            if series not in found.values() or len({value for _, value in series}) == 1:
                found[name] = series
        if curve.log:
            found = {name: tuple(point for point in points if point[1] > 0) for name, points in found.items()}
        if any(found.values()):
            charts.append(lines(curve.title, found, y=curve.y, log=curve.log))
    return charts


def staleness_charts(archive: Archive) -> list[Chart]:
    """Age of tokens when they were trained on, and where that age came from."""
    histograms = {where.replace("_", " "): _histogram(archive, where) for where in ("in_flight", "in_queue")}
    charts = []
    if any(histograms.values()):
        charts.append(bars("Steps that a token spent", histograms, x="steps", y="share of the tokens"))
    for draw, curve in ((areas, AGE_PARTS), (lines, AGE), (lines, TOO_OLD)):
        if found := _series(archive, curve.names):
            charts.append(draw(curve.title, found, y=curve.y))
    return charts


def dropped_charts(archive: Archive) -> list[Chart]:
    """Lengths of dropped and trained responses: if dropped ones are longer, dropping teaches brevity."""
    reasons = sorted(name.removeprefix(REJECTED) for name in archive.names if name.startswith(REJECTED))
    charts = []
    if reasons:
        counts = {"trained": _total(archive, "groups/trained")} | {
            reason: _total(archive, REJECTED + reason) for reason in reasons
        }
        lengths = {"trained": _mean(archive, "completions/length_mean", "groups/trained")}
        lengths |= {reason: _mean(archive, LENGTH_REJECTED + reason, REJECTED + reason) for reason in reasons}
        charts.append(bars("Groups", {"groups": counts}, y="groups"))
        if known := {reason: length for reason, length in lengths.items() if length is not None}:
            charts.append(bars("Mean length of their responses", {"length": known}, y="tokens"))
    by_band = {
        name: {band: mean for band in BANDS if (mean := _mean_of_band(archive, name, band)) is not None}
        for name in ("staleness/masked_share", "policy/left_out", "weight/zero")
    }
    if any(share for shares in by_band.values() for share in shares.values()):
        charts.append(
            bars(
                "Tokens out of the loss, by length of the response",
                by_band,
                y="share of them, mean over steps",
            )
        )
    if not archive.series("tokens/short"):
        return charts
    trained = {"trained": {band: _total(archive, f"tokens/{band}") for band in BANDS}}
    return [*charts, bars("Trained tokens, by length of the response", trained, y="tokens")]


def waiting_charts(archive: Archive) -> list[Chart]:
    """Which side waited for the other: the bottleneck is the side that never waits."""
    if not archive.learner_times:
        return []
    began = archive.began_at
    rows = archive.history.rows
    learner = [
        ((row["time"] - began) / 60, row["idle/learner"])
        for _, row in sorted(rows.items())
        if {"time", "idle/learner"} <= row.keys()
    ]
    idle = _of_generators(archive, "idle_s", began)
    paused = _of_generators(archive, "paused_s", began)
    # `time/sampling_s` and `time/reward_s` are measured per group in the generators, not per step.
    phases = [
        name for name in archive.names if name.startswith("time/") and not name.endswith(("_s", "/step"))
    ]
    charts = [
        lines(
            "Waiting: learner for groups, generators for leave",
            {"learner": learner, **idle},
            x="minutes",
            y="share of the time",
        )
    ]
    if phases:
        charts.append(
            areas(
                "A step of the learner",
                {name.removeprefix("time/"): archive.series(name) for name in phases},
                y="s",
            )
        )
    if any(paused.values()):
        charts.append(
            lines("Generators standing still for new weights", paused, x="minutes", y="share of the time")
        )
    speed = {
        generator: [
            ((row["time"] - began) / 60, row["tokens_per_s"])
            for row in rows
            if {"time", "tokens_per_s"} <= row.keys()
        ]
        for generator, rows in list(archive.generators.items())[:MOST_GENERATORS]
        if rows
    }
    if speed:
        charts.append(lines("Sampling", speed, x="minutes", y="tokens/s"))
    return charts


def growth_shares(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """(Unix seconds, share of the time since the line before) of a counter of seconds, which a restart
    resets."""
    shares = []
    for before, now in pairwise(rows):
        if {name, "alive_s", "time"} <= now.keys():
            restarted = now["alive_s"] <= before.get("alive_s", 0.0)
            alive_s = now["alive_s"] - (0.0 if restarted else before.get("alive_s", 0.0))
            waited_s = now[name] - (0.0 if restarted else before.get(name, 0.0))
            if alive_s > 0:
                shares.append((now["time"], min(1.0, max(0.0, waited_s / alive_s))))
    return shares


def _of_generators(archive: Archive, name: str, began: float) -> dict[str, Points]:
    shares = {generator: growth_shares(rows, name) for generator, rows in archive.generators.items()}
    worst = sorted(shares, key=lambda generator: -sum(share for _, share in shares[generator]))[
        :MOST_GENERATORS
    ]
    return {
        generator: [((at - began) / 60, share) for at, share in shares[generator]]
        for generator in sorted(worst)
        if shares[generator]
    }


def _series(archive: Archive, patterns: Sequence[str]) -> dict[str, Series]:
    """The series of all metrics that match, in the order of the patterns."""
    names = dict.fromkeys(
        name for pattern in patterns for name in archive.names if fnmatchcase(name, pattern)
    )
    return {name: archive.series(name) for name in names}


def _histogram(archive: Archive, where: str) -> Mapping[str, float]:
    """Mean over the run of `staleness/<where>/<steps>`; a step without a bin had no token of that age."""
    prefix = f"staleness/{where}/"
    bins = sorted(int(name.removeprefix(prefix)) for name in archive.names if name.startswith(prefix))
    measured = len(archive.series(f"{prefix}0"))
    return {str(steps): _total(archive, f"{prefix}{steps}") / measured for steps in bins}


def _total(archive: Archive, name: str) -> float:
    return sum(value for _, value in archive.series(name))


def _mean(archive: Archive, name: str, weight: str) -> float | None:
    """Weighted mean over the steps; None without weight."""
    weights = dict(archive.series(weight))
    pairs = [(value, weights.get(step, 0.0)) for step, value in archive.series(name)]
    total = sum(one for _, one in pairs)
    return sum(value * one for value, one in pairs) / total if total else None


def _mean_of_band(archive: Archive, name: str, band: str) -> float | None:
    """Mean over the steps that had tokens in responses of that length; None without such steps."""
    trained = dict(archive.series(f"tokens/{band}"))
    shares = [share for step, share in archive.series(f"{name}/{band}") if share or trained.get(step)]
    return sum(shares) / len(shares) if shares else None
