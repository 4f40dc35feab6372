"""Prints tables, samples, checks and plans on a terminal. Text of models is never read as markup."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.rewards.base import ABSTAINED
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.text import number, visible, visible_lines

if TYPE_CHECKING:  # a command imports only what it shows
    from asyncrl.preflight.checks.base import Outcome
    from asyncrl.preflight.environment_trial import Trial as EnvironmentTrial
    from asyncrl.preflight.forecast import Forecast
    from asyncrl.preflight.reward_trial import Trial, Tried
    from asyncrl.results import page

VERDICT_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}
ENVIRONMENT_KINDS = {
    "tools": "tools without a state",
    "tool_class": "an object with tools",
    "text": "a text environment",
    "rollout": "a rollout",
}
RESPONSE_KINDS = {"reference": "reference", "wrong": "wrong on purpose", "sample": "sample"}


def show_tables(tables: "Iterable[page.Table]") -> None:
    """Print tables of text."""
    console = Console(highlight=False)
    for table in tables:
        shown = Table(title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        shown.title = table.title or None
        for index, name in enumerate(table.head):
            shown.add_column(Text(visible(name)), overflow="fold", no_wrap=index == 0)
        for row in table.rows:
            shown.add_row(*(Text(visible(cell)) for cell in row))
        console.print(shown)


def show_samples(samples: Iterable[SampleRecord]) -> None:
    """Print rollouts in full."""
    console = Console(highlight=False)
    for sample in samples:
        for line in full_lines(sample):
            console.print(line, soft_wrap=True)


def full_lines(sample: SampleRecord) -> list[Text]:
    """Return head, prompt, response and judgements. A bar keeps a model's lines from looking like ours."""
    from asyncrl.results.recorded import sample_head

    head, details = sample_head(sample)
    style = "yellow" if math.isnan(sample.reward) or sample.reward <= 0 else "green"
    lines = [Text.assemble((visible(head), style), ("  " + visible(details), "dim"))]
    lines += [*_barred(sample.prompt, "?", "dim"), *_barred(sample.response, "|", "")]
    for one in sample.judgements:
        lines.append(Text(f"  judge {visible(one['part'])} {number(one['score'])}", style))
        lines += [*_barred(one["prompt"], "?", "dim"), *_barred(one["answer"], "|", "")]
    return lines


def _barred(text: str, mark: str, look: str) -> list[Text]:
    return [Text(f"  {mark} {line}", look) for line in visible_lines(text).split("\n") if text]


def show_outcome(outcome: "Outcome", console: Console) -> None:
    """Print a check in one line, with its fix below."""
    finding = outcome.finding
    head = Text.assemble((f"{finding.verdict:<8}", VERDICT_STYLES[finding.verdict]), f"{outcome.name:<15}")
    console.print(head.append(finding.found.strip().replace("\n", "\n" + " " * 23)), soft_wrap=True)
    if finding.fix:
        console.print(Text.assemble(" " * 23, ("fix: ", "bold"), finding.fix), soft_wrap=True)


def show_plan(plan: "Forecast") -> None:
    """Print the numbers of a plan and its warnings."""
    console = Console(highlight=False)
    console.print(plan_table(plan))
    for warning in plan.warnings:
        console.print(Text(f"! {warning}", "bold yellow"), soft_wrap=True)
    if not plan.warnings:
        console.print(Text("it fits this machine, as far as these numbers tell", "green"))


def plan_table(plan: "Forecast") -> Table:
    """Return the numbers of a plan, by section, each with its formula."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column()
    made.add_column(justify="right", no_wrap=True)
    made.add_column(style="dim")
    section = ""
    for line in plan.lines:
        if line.section != section:
            section = line.section
            made.add_row(Text(section, "bold"), "", "")
        made.add_row(f"  {line.name}", line.shown, Text(line.formed))
    return made


def show_trial(trial: "Trial") -> None:
    """Print how reward functions scored responses: figures, answers, failures and doubts."""
    console = Console(highlight=False)
    kinds = Counter(case.kind for case in trial.cases)
    amounts = ", ".join(f"{amount} {RESPONSE_KINDS[kind]}" for kind, amount in kinds.items())
    console.print(f"{len(trial.cases)} responses: {amounts}")
    table = Table(box=None, pad_edge=False)
    for title in ("part", "weight", "on", "mean", "min", "max", "p50 ms", "max ms", "failed"):
        table.add_column(title, justify="left" if title in ("part", "on") else "right")
    for part in trial.parts:
        times = [f"{1000 * value:.1f}" for value in (statistics.median(part.seconds), max(part.seconds))]
        head = [part.function.part, f"{part.function.weight:g}"]
        tail = [*times, f"{part.failures.total()}"]
        for kind, values in part.scores.items() or {"nothing": []}.items():
            figures = [number(f(values)) if values else "-" for f in (statistics.fmean, min, max)]
            table.add_row(*head, kind, *figures, *tail)
            head, tail = ["", ""], ["", "", ""]
    console.print(table)
    lacks_references = bool(kinds["wrong"]) and not kinds["reference"]
    doubts = (_doubts(part, lacks_references=lacks_references) for part in trial.parts)
    for line in (*map(_answers, trial.parts), *map(_failures, trial.parts), *doubts):
        for text in line:
            console.print(text, soft_wrap=True)
    if trial.unscored:
        console.print(Text(f"{trial.unscored} responses without a score: {ABSTAINED}", "red"), soft_wrap=True)


def show_environment(trial: "EnvironmentTrial") -> None:
    """Print what an environment is, its tools, and an episode turn by turn."""
    console = Console(highlight=False)

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    if has := trial.description:
        takes = "all columns" if has["takes_all"] else f"columns {', '.join(has['columns']) or 'none'}"
        kind = ENVIRONMENT_KINDS[has["kind"]]
        say(f"{trial.uses}: {kind}, takes {takes}; Python {has['python']}, started in {trial.start_s:.2f} s")
    for schema in trial.schemas:
        say(visible(json.dumps(schema, ensure_ascii=False)))
    for role, text in trial.spoken:
        say(f"{role:>11} | {visible(text)}")
    if end := trial.outcome:
        reward = "no reward of its own" if end.reward is None else f"reward {end.reward:g}"
        say(f"ended with `{end.finish_reason}`, {reward}, in {trial.play_s:.2f} s", "bold")
    if trial.problem:
        say(f"failed: {visible(trial.problem)}", "red")


def _answers(part: "Tried") -> Iterator[Text]:
    found = [answer for answer in part.answers if answer]
    if any(answer is not None for answer in part.answers):
        shown = ", ".join(f"`{visible(answer)}`" for answer in list(dict.fromkeys(found))[:3])
        like = f", like {shown}" if shown else ""
        share = f"{len(found)} of {len(part.answers)} responses"
        yield Text(f"{part.function.part} finds an answer in {share}{like}")


def _failures(part: "Tried") -> Iterator[Text]:
    from asyncrl.preflight.reward_trial import TIMEOUTS

    if part.abstained:
        text = f"{part.function.part} abstains for {len(part.abstained)} responses: it returned None"
        yield Text(text, "" if part.scores else "yellow")
    for message, amount in part.failures.most_common():
        yield Text(f"{amount} x on {visible(message)}", "red")
    if part.untried:
        skipped = f"{part.untried} more responses were not tried after {TIMEOUTS} time-outs"
        yield Text(f"{part.function.part}: {skipped}", "red")


def _doubts(part: "Tried", *, lacks_references: bool) -> Iterator[Text]:
    """Yield warnings about scores that do not separate good responses from bad, and the function's output."""
    from asyncrl.preflight.reward_trial import REFERENCES

    name, right, wrong = part.function.part, part.scores.get("reference"), part.scores.get("wrong")
    scores = [score for values in part.scores.values() for score in values]
    if len(scores) > 1 and min(scores) == max(scores):
        missing = f" The data has no reference answer in {', '.join(REFERENCES)}." if lacks_references else ""
        yield Text(
            f"{name} gives every response {number(scores[0])}: from equal rewards nothing is learned; it "
            f"should give good answers more than bad ones.{missing}",
            "yellow",
        )
    elif right and wrong and statistics.fmean(right) <= statistics.fmean(wrong):
        yield Text(
            f"{name} gives the reference answers no more than wrong ones: fine for a part about form; "
            "otherwise it may expect another format than that of the data",
            "yellow",
        )
    if part.unequal:
        yield Text(
            f"{name} scores one response differently when it is called again ({visible(part.unequal)}): "
            "chance is trained on; seed it by the response, or let a judge answer at temperature 0",
            "yellow",
        )
    if part.printed:
        yield Text(f"{name} printed: {visible(part.printed)}", "dim")
