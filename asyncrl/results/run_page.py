"""`asyncrl report`: a run on one HTML page that opens without a network."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from asyncrl.files import read_record
from asyncrl.results.archive import Archive, read_archive
from asyncrl.results.charts import BANDS, CURVES, STALENESS, Curve, draw_curves, waiting_charts
from asyncrl.results.page import Section, Table, render_page
from asyncrl.results.recorded import Wanted, choose
from asyncrl.run.directory import find_run, write_text
from asyncrl.telemetry.alarms import ALARMS
from asyncrl.telemetry.base import sample_from
from asyncrl.telemetry.history import REJECTED, Series, of_sets
from asyncrl.telemetry.jsonl import Tail
from asyncrl.telemetry.text import duration, number, share

HEADLINES = (
    "eval/accuracy", "eval/pass@*", "eval/reward_mean", "reward/mean", "completions/length_mean",
    "policy/entropy", "staleness/mean", "idle/learner",
)  # fmt: skip
HIGHER_IS_BETTER = ("eval/", "reward/")  # prefixes of metrics whose largest value is the best
SHOWN = 4  # samples of each kind
LENGTH_REJECTED = "groups/length_rejected_"
OUT_OF_THE_LOSS = ("staleness/masked_share", "policy/left_out", "weight/zero")


def write_report(run: Path | None, to: Path | None) -> Path:
    """Write the page, by default into the run directory, and return its path."""
    archive = read_archive(find_run(run))
    path = to or archive.directory.path / "report.html"
    write_text(path, report_page(archive))
    return path


def report_page(archive: Archive) -> str:
    """Return the whole page of one run."""
    if archive.directory.stage.exists():
        sections = stage_sections(archive)
    else:
        sections = [
            _summary(archive),
            Section(title="Learning", charts=draw_curves(archive, CURVES)),
            Section(
                title="Staleness",
                note="The age of a token: steps between sampling it and training on it. In flight: "
                "while its group was being sampled; in queue: while the group waited in the buffer.",
                tables=age_tables(archive),
                charts=draw_curves(archive, STALENESS),
            ),
            Section(
                title="Dropped against trained",
                note="Dropped responses should be as long as trained ones. Otherwise a rule against old or "
                "useless groups has become a filter on length.",
                tables=dropped_tables(archive),
            ),
            Section(
                title="Who waited for whom", note="The slow side never waits.", charts=waiting_charts(archive)
            ),
            *sample_sections(archive.directory.samples),
        ]
    model = archive.config.get("model", {}).get("path", "?")
    data = ", ".join(archive.sources)
    subtitle = f"asyncrl run: model {model}, data {data}; this page was written {_date(time.time())}"
    sections.append(_setup(archive))
    filled = [one for one in sections if one.facts or one.tables or one.charts or one.samples or one.text]
    return render_page(archive.name, subtitle, filled)


def stage_sections(archive: Archive) -> list[Section]:
    """Return what was measured of a stage before and after, and the curves of what TRL reported."""
    record = read_record(archive.directory.stage) or {}
    before, after = record.get("before") or {}, record.get("after") or {}
    facts = [
        ("stage", str(record.get("stage", "?"))),
        ("state", archive.state),
        ("steps", str(archive.status.step if archive.status else "?")),
        ("wall time", duration(archive.wall_s)),
        *((key, rows) for key, rows in record.get("fixed", {}).items() if rows and key.startswith("data.")),
    ]
    rows = [(name, f"{before[name]:.4g}", f"{after[name]:.4g}" if after else "-") for name in before]
    tables = [Table(("held out", "before", "after"), rows)] if rows else []
    message = archive.status.message if archive.status else ""
    names = sorted({name.partition("/")[2] for name in archive.names if name.startswith(("train/", "eval/"))})
    curves = [Curve(name, (f"train/{name}", f"eval/{name}")) for name in names if name not in ("epoch",)]
    return [
        Section(title="Summary", note=message, facts=facts, tables=tables),
        Section(title="Learning", charts=draw_curves(archive, curves)),
    ]


def _summary(archive: Archive) -> Section:
    audit = archive.status.audit if archive.status else None
    learner = [value for _, value in archive.history.series("idle/learner")]
    facts = [
        ("state", archive.state),
        ("step", f"{archive.step} of {archive.total_steps or '?'}"),
        ("wall time", duration(archive.wall_s)),
        ("trained tokens", f"{archive.history.total('tokens'):,.0f}"),
        ("sampled tokens", f"{archive.counted('sampled_tokens'):,.0f}"),
        ("groups trained", f"{archive.history.total('groups/trained'):,.0f}"),
        ("groups rejected", f"{sum(archive.history.rejected.values()):,}"),
        ("learner waited", f"{sum(learner) / len(learner):.0%} of its steps" if learner else "-"),
    ]
    if audit:
        facts.insert(7, ("groups lost", f"{audit.missing:,} of {audit.issued:,}"))
    for title, counts in (
        ("faults of the environment", archive.faults),
        ("missing episodes", archive.history.missing),
    ):
        if shown := [f"{reason} {count:,.0f}" for reason, count in sorted(counts.items()) if count]:
            facts.append((title, ", ".join(shown)))
    message = archive.status.message if archive.status else ""
    rows = []
    for name in [name for wanted in HEADLINES for name in of_sets(wanted, archive.names)]:
        of = partial(archive.history.shown, name)
        best = of("best") if name.startswith(HIGHER_IS_BETTER) else ""
        rows.append((name, of("first"), of("last"), best))
    title = "before and after" if rows else "no step yet"
    tables = [Table(("metric", "first", "last", "best"), rows, title), *_alarms(archive)]
    return Section(title="Summary", note=message, facts=facts, tables=tables)


def age_tables(archive: Archive) -> list[Table]:
    """Return the shares of the tokens by the steps that they spent; no share means no token of that age."""
    found = {"in_flight": dict[int, float](), "in_queue": dict[int, float]()}
    for where, shares in found.items():
        prefix = f"staleness/{where}/"
        for name in [name for name in archive.names if name.startswith(prefix)]:
            mean = archive.history.total(name) / len(archive.history.series(f"{prefix}0"))
            shares[int(name.removeprefix(prefix))] = mean
    ages = sorted({age for shares in found.values() for age in shares})
    rows = [(str(age), *(share(shares.get(age)) for shares in found.values())) for age in ages]
    return [Table(("steps", "in flight", "in queue"), rows, "steps that a token spent")] if rows else []


def dropped_tables(archive: Archive) -> list[Table]:
    """Return lengths of dropped and trained responses: if dropped ones are longer, responses get shorter."""
    history = archive.history
    # (number of groups, mean length) of what was trained, and of each reason to reject.
    kinds = {"trained": ("groups/trained", "completions/length_mean")}
    for name in [name for name in archive.names if name.startswith(REJECTED)]:
        kinds[name.removeprefix(REJECTED)] = (name, name.replace(REJECTED, LENGTH_REJECTED))
    rows = []
    for kind, (groups, length) in kinds.items():
        mean = _mean(history.series(length), dict(history.series(groups)))
        rows.append((kind, f"{history.total(groups):,.0f}", number(mean)))
    tables = [Table(("groups", "number", "mean length in tokens"), rows)] if len(kinds) > 1 else []
    if history.series("tokens/short"):
        bands = []
        for band in BANDS:
            trained, shares = dict(history.series(f"tokens/{band}")), list[str]()
            for series in (history.series(f"{name}/{band}") for name in OUT_OF_THE_LOSS):
                # Over the steps that had tokens in responses of that length.
                counts = {step: 1.0 for step, value in series if value or trained.get(step)}
                shares.append(share(_mean(series, counts)))
            bands.append((band, f"{history.total(f'tokens/{band}'):,.0f}", *shares))
        head = ("length of the response", "trained tokens", *OUT_OF_THE_LOSS)
        tables.append(Table(head, bands, "tokens out of the loss, mean over steps"))
    return tables


def _mean(series: Series, weights: Mapping[int, float]) -> float | None:
    """Return the mean over the steps by their weights; None without weight."""
    total = sum(weights.get(step, 0.0) for step, _ in series)
    return sum(value * weights.get(step, 0.0) for step, value in series) / total if total else None


def _alarms(archive: Archive) -> list[Table]:
    rows = []
    for name, spans in archive.alarm_spans.items():
        steps = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in spans)
        alarm = ALARMS.get(name)
        meaning = (alarm.metric, alarm.cure) if alarm else ("?", "an alarm of another release")
        rows.append((name, steps, *meaning))
    return [Table(("alarm", "steps", "metric", "what to do"), rows, "alarms")] if rows else []


def sample_sections(path: Path) -> list[Section]:
    """Return samples of each kind. The file may be large: it is read once, and only these are kept."""
    kept = "From the samples of each step; of equals the newest."
    dropped = "From groups that were taken and not trained, with the reason."
    shown = {
        ("Held-out samples", "Newest last."): Wanted(count=SHOWN, kind="eval"),
        ("Best samples", kept): Wanted(count=SHOWN, kind="train", order="best"),
        ("Worst samples", kept): Wanted(count=SHOWN, kind="train", order="worst"),
        ("Dropped samples", dropped): Wanted(count=SHOWN, kind="dropped"),
    }
    chosen = choose(map(sample_from, Tail(path)), *shown.values())
    return [
        Section(title=title, note=note, samples=samples)
        for (title, note), samples in zip(shown, chosen, strict=True)
    ]


def _setup(archive: Archive) -> Section:
    tables = []
    if archive.starts:
        last = archive.starts[-1]
        rows = [("hardware of the learner", last.hardware), *last.versions.items()]
        tables.append(Table(("software", "release"), rows, "at the last start"))
        starts = []
        for before, start in zip([archive.starts[0], *archive.starts], archive.starts, strict=False):
            old, new = before.versions, start.versions
            names = [name for name in sorted(old | new) if old.get(name) != new.get(name)]
            changes = ", ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in names)
            starts.append((_date(start.time), str(start.step), changes))
        tables.append(Table(("started", "from step", "other releases than before"), starts))
    text = archive.directory.config.read_text(encoding="utf-8")
    return Section(title="Setup", tables=tables, text=text, text_title="resolved config")


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
