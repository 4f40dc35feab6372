"""The dashboard as a pure function of a state, the most urgent lines first.

Each line is a `Text` cut to the width. Figures are always shown; curves, generators, samples share the rest.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from rich.cells import cell_len, chop_cells
from rich.console import Group
from rich.text import Text

from asyncrl.control.base import MemberStatus
from asyncrl.telemetry.advice import bottleneck
from asyncrl.telemetry.alarms import ALARMS
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.history import Series, chosen, of_sets, score, set_of, thinned
from asyncrl.telemetry.state import RunView
from asyncrl.telemetry.status import PLACES, SILENT_S
from asyncrl.telemetry.text import data_size, duration, number, one_line, share, visible

NOTE_S = 60.0  # seconds for which the dashboard shows a warning from a log
NARROWEST = 20  # columns; a narrower terminal wraps the lines
# All other states are yellow.
STATE_STYLES = {"sampling": "green", "training": "green", "finished": "cyan", "dirty": "red", "failed": "red"}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
UNLIMITED_LINES = 40  # lines below the figures where the height of the terminal does not matter


def render(state: RunView, width: int, height: int | None = None) -> Group:
    """Return the dashboard at `width` columns, cut to `height` lines (at least 12) if a height is given."""
    width = max(width, NARROWEST)
    figures = [_header(state, width), *_urgent(state, width)]
    if state.is_stage:
        return Group(*[*figures, *_of_stage(state, width)][:height])
    figures += [
        *_figures(state, width),
        *_episodes(state, width),
        *_ledger(state, width),
        *_hosts(state, width),
    ]
    left = height - len(figures) if height else UNLIMITED_LINES
    curve_lines = _curves(state, width, min(10, left - 8))
    left -= len(curve_lines)
    kept_for_samples = 3 if left < 12 else 8
    generators = _generators(state, width, max(3, min(14, left - kept_for_samples)))
    left -= len(generators)
    lines = [*figures, *curve_lines, *generators]
    if left >= 3:
        count = max(1, min(3, left // 4))
        for sample in list(state.samples)[::-1][:count]:
            lines += sample_lines(sample, width, min(6, left // count))
    return Group(*lines[:height])


def _header(state: RunView, width: int) -> Text:
    status = state.status
    name = status.state if status else "no status yet"
    total = status.total_steps if status else 0
    state_text = (name, STATE_STYLES.get(name, "yellow"))
    head = Text.assemble((visible(state.run), "bold"), "  ", state_text, f"  step {state.step}/{total}  ")
    remaining = f", {duration(state.eta_s)} left" if state.eta_s is not None else ""
    version = "" if state.is_stage else f"v{status.version if status else 0}  "
    tail = Text(f"  {version}{duration(state.elapsed_s)}{remaining}")
    done = min(1.0, state.step / total) if total else 0.0
    room = max(0, width - head.cell_len - tail.cell_len - 5)
    full = int(done * room)
    bar = Text.assemble(("━" * full, "green"), ("─" * (room - full), "dim"), f" {done:4.0%}")
    return one_line(Text.assemble(head, bar if room >= 4 else "", tail), width)


def _urgent(state: RunView, width: int) -> list[Text]:
    """Return what a person should read first, and while alarms are active their metrics and what to do."""
    if state.silent_s > SILENT_S:
        silent = f"! the learner has been silent for {duration(state.silent_s)}; see logs/learner.jsonl"
        line = Text(silent, "bold red")
    elif state.status and state.status.message:
        line = Text(visible(state.status.message), "bold")
        if state.status.is_final:
            line.overflow = "fold"  # the reason is worth more than a line
    elif state.status and state.status.is_final:
        line = Text(f"the run has {state.status.state}", "bold")
    elif state.notes and (state.status is None or state.now - state.notes[-1].at < NOTE_S):
        line = Text(f"! {visible(str(state.notes[-1]))}", "bold yellow")
    else:
        line = Text(f"> {bottleneck(state)}", "magenta")
    lines = [line if line.overflow else one_line(line, width)]
    if alarms := [ALARMS[name] for name in state.alarms if name in ALARMS]:
        metrics = dict.fromkeys(alarm.metric for alarm in alarms)
        values = ", ".join(f"{metric} {number(state.history.latest(metric))}" for metric in metrics)
        cures = "; ".join(alarm.cure for alarm in alarms)
        lines.append(one_line(Text(f"! {values}: {cures}", "bold red"), width))
    return lines


def _figures(state: RunView, width: int) -> list[Text]:
    """Return two columns of key figures: learning on the left, machinery on the right."""

    def of(name: str, digits: int = 3) -> str:
        return number(state.history.latest(name), digits)

    def percent(name: str) -> str:
        return share(state.history.latest(name))

    column, scores = width // 2 + 1, []
    for name in of_sets("eval/reward_mean", state.history.names):
        evaluated = state.history.series(name)
        scores.append(f"{visible(set_of(name))} {score(state.history.rows[evaluated[-1][0]], name)}".strip())
    held_out = "  ".join(scores) or "-"
    if len(scores) == 1:
        at, value = chosen(evaluated, "best")
        best = f"  best {number(value)} at step {at}"
        held_out += best if len("held-out ") + cell_len(held_out + best) < column else ""
    bound = f" of {state.status.lag_bound}" if state.status and state.status.lag_bound is not None else ""
    cut, masked = percent("completions/truncated_share"), percent("staleness/masked_share")
    idle = f"gen {share(state.idle_generators)}  stall {share(state.stalled_generators)}"
    compute = f"{of('perf/learner_tflops_per_s')} TFLOP/s"
    if gpu := state.fullest_gpu:
        compute = f"mfu {percent('perf/mfu')}  {data_size(gpu[0])} of {data_size(gpu[1])}"
    learning = [
        ("reward", f"{of('reward/mean')} ± {of('reward/std')}"),
        ("held-out", held_out),
        ("length", f"{of('completions/length_mean')}  max {of('completions/length_max')}  cut {cut}"),
        ("policy", f"entropy {of('policy/entropy')}  grad {of('policy/grad_norm')}"),
        ("mismatch", f"k3 {of('mismatch/k3', 2)}  ess {of('mismatch/ess', 2)}"),
        ("weights", f"probe {of('weights/probe_max', 2)}  {of('weights/transfer_gb_per_s', 2)} GB/s"),
    ]
    machinery = [
        ("staleness", f"{of('staleness/mean')}  max {of('staleness/max')}{bound}  masked {masked}"),
        ("", f"{of('staleness/in_flight', 2)} in flight + {of('staleness/in_queue', 2)} in queue"),
        ("generate", f"{state.generated_tokens_per_s:,.0f} tok/s"),
        ("learn", f"{of('perf/learner_tokens_per_s')} tok/s  {of('time/step')} s/step"),
        ("compute", compute),
        ("waiting", f"lrn {share(state.idle_learner)}  {idle}"),
    ]
    left = [one_line(Text.assemble((f"{name:<9}", "dim"), text), column - 1) for name, text in learning]
    right = [Text.assemble((f"{name:<10}", "dim"), text) for name, text in machinery]
    return _side_by_side(left, right, column, width)


def _side_by_side(left: Sequence[Text], right: Sequence[Text], column: int, width: int) -> list[Text]:
    """Return lines of `left` that go on with those of `right`, which begin at a column."""
    lines = []
    for first, second in zip_longest(left, right, fillvalue=Text("")):
        line = first.copy()
        line.pad_right(column - line.cell_len)
        lines.append(one_line(line.append_text(second), width))
    return lines


def _of_stage(state: RunView, width: int) -> list[Text]:
    """Return the newest of what TRL has reported, on rows of training and held-out ones, and the losses."""
    names = {name.partition("/")[2] for row in state.history.rows.values() for name in row if "/" in name}
    lines = []
    for name in sorted(names, key=lambda name: (name != "loss", name)):
        train, held_out = (state.history.latest(f"{kind}/{name}") for kind in ("train", "eval"))
        if train is not None or held_out is not None:
            shown = f"{number(train):>10}"
            shown += f"  held-out {number(held_out)}" if held_out is not None else ""
            lines.append(one_line(Text.assemble((f"{visible(name):<24}", "dim"), shown), width))
    loss = state.history.series("train/loss")
    return [*lines, *(curve("train/loss", loss, width=width, height=8, style="cyan") if loss else [])]


def _episodes(state: RunView, width: int) -> list[Text]:
    """Return one line about the episodes of an environment: turns, tool calls, seconds, faults."""
    latest = state.history.latest
    if latest("episodes/turns_mean") is None:
        return []
    wrong = [latest(f"environment/tools/{mistake}") for mistake in ("invalid", "late", "raised")]
    shown = {
        "turns {}": latest("episodes/turns_mean"),
        "calls {}": latest("environment/tools/calls"),
        "wrong {}": sum(known) if (known := [one for one in wrong if one is not None]) else None,
        "model {} s": latest("environment/model_s"),
        "environment {} s": latest("environment/environment_s"),
    }
    parts = [form.format(number(value, 2)) for form, value in shown.items() if value is not None]
    line = Text.assemble(("episode  ", "dim"), "  ".join(parts))
    for title, counts in (("faults", state.faults), ("missing", state.history.missing)):
        found = [f"{visible(reason)} {count:.0f}" for reason, count in sorted(counts.items()) if count]
        line.append(f"  {title} {'  '.join(found)}" if found else "", "yellow")
    return [one_line(line, width)]


def _ledger(state: RunView, width: int) -> list[Text]:
    """Return where every issued id is, which shows that nothing is lost, and what was dropped."""
    lines = []
    if audit := state.status.audit if state.status else None:
        counts = {place: getattr(audit, place) for place in PLACES}
        parts = " + ".join(f"{count:,} {place}" for place, count in counts.items() if count) or "0"
        verdict = (f"{audit.missing:,} missing", "bold red") if audit.missing else ("0 missing", "green")
        text = Text.assemble(("buffer   ", "dim"), f"{audit.issued:,} = {parts}  ", verdict)
        size = f"  {data_size(audit.payload_bytes)}"
        lines.append(text.append(size if text.cell_len + len(size) <= width else "", "dim"))
    dropped = [f"{visible(name)} {count:,}" for name, count in sorted(state.dropped.items()) if count]
    control = state.status.counters if state.status else {}
    failed = [f"  {name} {control[name]:.0f}" for name in ("died", "updates_failed") if control.get(name)]
    shown = ("  ".join(dropped) or "nothing", ("".join(failed), "yellow"))
    return [one_line(line, width) for line in (*lines, Text.assemble(("dropped  ", "dim"), *shown))]


def _hosts(state: RunView, width: int) -> list[Text]:
    """Return one line about the hosts of a run on several: how many run, and what the others wait for."""
    counts = Counter(phase for phase, _ in state.hosts.values()).most_common()
    others = [
        f"  {visible(name)} is {visible(phase)}" + (f": {visible(why)}" if why else "")
        for name, (phase, why) in sorted(state.hosts.items())
        if phase != "running"
    ]
    running = "  ".join(f"{count} {visible(phase)}" for phase, count in counts)
    line = Text.assemble(("hosts    ", "dim"), running, (";".join(others), "yellow"))
    return [one_line(line, width)] if state.hosts else []


def _curves(state: RunView, width: int, height: int) -> Sequence[Text]:
    """Return rewards in training and of the first held-out set side by side, if that has two evaluations."""
    name = next(iter(of_sets("eval/reward_mean", state.history.names)), "eval/reward_mean")
    reward, evaluated = state.history.series("reward/mean"), state.history.series(name)
    if height < 5:
        return []
    if len(evaluated) < 2:
        return curve("reward/mean", reward, width=width, height=height, style="cyan")
    column = (width - 1) // 2
    left = curve("reward/mean", reward, width=column, height=height, style="cyan")
    right = curve(name, evaluated, width=column, height=height, style="green")
    return _side_by_side(left, right, column + 1, width)


def _generators(state: RunView, width: int, height: int) -> list[Text]:
    """Return a head and a line per generator; without room for all, the worst ones and a summary line."""
    if not state.members:
        return [Text("no generators have joined", "yellow")]
    newest = state.status.version if state.status else max(member.version for member in state.members)
    by_name = sorted(state.members, key=lambda member: (len(member.generator_id), member.generator_id))
    fit = len(by_name) < height

    def order(member: MemberStatus) -> tuple[float, ...]:
        """Those in trouble come first; without room for all, then those far behind, then slow ones."""
        behind = newest - member.version if member.version >= 0 else 0
        is_well = member.state != "dirty" and member.silent_s <= SILENT_S
        return (is_well, *(() if fit else (-behind, member.metrics.get("tokens_per_s", 0.0))))

    shown = sorted(by_name, key=order)[: None if fit else height - 2]
    id_width = min(max(12, *(len(member.generator_id) for member in shown)), max(12, width - 60))
    title = "generator" if fit else "worst of all"
    head = f"{title:<{id_width}} {'state':<16} {'version':>8} {'behind':>6} {'tok/s':>8} {'running':>7}"
    lines = [one_line(Text(head, "dim"), width)]
    lines += [one_line(_member(member, newest, id_width), width) for member in shown]
    if not fit:
        lines.append(_summary(state.members, newest, width))
    return lines


def _member(member: MemberStatus, newest: int, id_width: int) -> Text:
    tokens, running = member.metrics.get("tokens_per_s"), member.metrics.get("running_requests")
    name = one_line(Text(visible(member.generator_id)), id_width)
    name.pad_right(id_width - name.cell_len)
    silent = f"  silent {duration(member.silent_s)}" if member.silent_s > SILENT_S else ""
    # A generator has no version while weights arrive: it cannot sample with half of them.
    known = member.version >= 0
    version, behind = (f"v{member.version}", str(newest - member.version)) if known else ("-", "-")
    figures = f" {version:>8} {behind:>6} {number(tokens):>8} {number(running):>7}"
    state_text = (f" {member.state:<16.16}", STATE_STYLES.get(member.state, "yellow"))
    return Text.assemble(name, state_text, figures, (silent, "red"))


def _summary(members: Sequence[MemberStatus], newest: int, width: int) -> Text:
    """Return all generators in one line; parts that do not fit are left out, the least informative first."""
    tokens = sum(member.metrics.get("tokens_per_s", 0.0) for member in members)
    states = Counter(member.state for member in members)
    behind = max((newest - member.version for member in members if member.version >= 0), default=0)
    silent = sum(member.silent_s > SILENT_S for member in members)
    parts = [f"{silent} silent"] if silent else []
    dirty_first = sorted(states.items(), key=lambda item: (item[0] != "dirty", -item[1]))
    parts += [f"{count} {name}" for name, count in dirty_first]
    parts += [f"at most {behind} behind", f"{tokens:,.0f} tok/s"]
    text = f"all {len(members)}: {parts[0]}"
    for part in parts[1:]:
        if cell_len(f"{text}, {part}") <= width:
            text = f"{text}, {part}"
    return Text(text, "dim")


def sample_lines(sample: SampleRecord, width: int, height: int) -> list[Text]:
    """Return a rollout in at most `height` lines: a head, the end of the prompt, the response as it fits.

    With 2 lines it is without its prompt. Its control characters are visible.
    """
    width = max(width, NARROWEST)
    parts = ", ".join(f"{name} {number(value)}" for name, value in sample.parts.items())
    versions = sorted({version for version, _ in sample.versions})
    ages = f"v{versions[0]}" if versions else "v?"
    ages += f"-{versions[-1]}" if len(versions) > 1 else ""
    head = f"{sample.kind} {sample.step}  reward {number(sample.reward)}"
    head += f" ({parts})" if len(sample.parts) > 1 else ""
    head += f"  advantage {number(sample.advantage)}  {ages}  {sample.finish_reason}  {sample.generator_id}"
    style = "green" if sample.reward > 0 else "yellow"
    prompt, response = visible(sample.prompt), visible(sample.response)
    lines = [one_line(Text(visible(head), style), width)]
    if height > 2:  # the end of the prompt, which usually holds the question
        end = prompt if cell_len(prompt) <= width - 4 else f"…{prompt[4 - width :]}"
        while cell_len(end) > width - 4:
            end = f"…{end[2:]}"
        lines.append(Text(f"  ? {end}", "dim"))
    room = max(1, height - len(lines))
    pieces = chop_cells(response, width - 5) or [""]
    for index, piece in enumerate(pieces[:room]):
        more = "…" if index == room - 1 and len(pieces) > room else ""
        lines.append(one_line(Text(f"  {' ' if index else '>'} {piece}{more}"), width))
    return lines


@functools.lru_cache(maxsize=8)
def curve(title: str, series: Series, *, width: int, height: int, style: str) -> tuple[Text, ...]:
    """Return `height` lines of at most `width` cells: a title with the newest value, then the curve.

    Cached, because drawing dominates the cost of a dashboard and nothing changes between two steps: copy a
    line before you change it.
    """
    newest = number(series[-1][1]) if series else "no values yet"
    head = one_line(Text.assemble((title, "bold"), " ", newest), width)
    if len(series) < 2 or height < 5 or width < 10:
        return (head,)
    import plotext  # takes 0.15 s, which commands that draw no curve need not spend

    # Two points per column: on straight lines between few values, means of equal runs of many.
    known_steps, known = zip(*thinned(series, 2 * width), strict=True)
    places = np.linspace(series[0][0], known_steps[-1], 2 * width)
    steps, values = places.tolist(), np.interp(places, known_steps, known).tolist()
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height - 1)
    figure.draw(figure.signal(steps, values, marker="braille"))
    # plotext's default limits and ticks misplace a flat curve.
    marks = [low, (low + high) / 2, high]
    figure.ruler("y").lim(low, high)
    figure.ruler("y").ticks(marks, [number(mark, 2) for mark in marks])
    figure.ruler("x").lim(steps[0], steps[-1])
    figure.ruler("x").ticks([steps[0], steps[-1]], [f"{steps[0]:.0f}", f"{steps[-1]:.0f}"])
    lines = COLOUR.sub("", str(figure.build())).rstrip("\n").split("\n")
    return (head, *(one_line(Text(line, style=style), width) for line in lines))
