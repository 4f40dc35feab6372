"""`asyncrl reward test`: the reward functions of a config on its own data, in the very processes that a run uses.

Every part is tried alone, one response at a time, so that times are its own and one that fails hides no other.
"""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.config.schema import Config, RewardFunctionConfig
from asyncrl.data.dataset import Rows, load_rows
from asyncrl.data.prompts import PromptSource
from asyncrl.data.sample_plan import SamplePlan
from asyncrl.errors import DataError, RewardError
from asyncrl.preflight.validate import validated_config
from asyncrl.rewards.base import RewardInput
from asyncrl.rewards.pool import RewardPool
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.text import number, visible

# Columns that hold an answer, the first that is there.
REFERENCES = ("answer", "solution", "reference", "ground_truth", "target", "completion", "output")
KINDS = {"reference": "reference", "wrong": "wrong on purpose", "sample": "sample"}
# What models say early in training or late at night: nothing, nonsense, other alphabets, no end.
WRONG = (
    "",
    "I do not know.",
    "0",
    "-1 1,000 3.14 1e400 ####",
    "\\boxed{} </think> ```",
    "答案 \U0001f600 \x00 \u202e",
    "no " * 2000,
)
PRINTED_S = 0.05
TIMEOUTS = 3  # A part that hung this often is not tried further


@dataclass(frozen=True, slots=True)
class Case:
    """One response to be scored."""

    kind: str  # reference | wrong | sample
    given: RewardInput


@dataclass(slots=True)
class Tried:
    """What became of a part."""

    function: RewardFunctionConfig
    scores: dict[str, list[float]] = field(default_factory=dict)  # by kind of response
    # Of the responses that were scored, see `Rollout.answer`.
    answers: list[str | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    untried: int = 0
    printed: str = ""  # the end of what the function printed


def try_rewards(config_path: Path, overrides: Sequence[str], *, count: int, samples: Path | None) -> bool:
    """Score, print what was found, and say whether nothing failed."""
    config = validated_config(config_path, overrides)
    cases = list(sample_cases(config, samples, count) if samples else generic_cases(config, count))
    if not cases:
        raise DataError(f"{samples or config.data.train} holds no response to score; give another --samples")
    parts = asyncio.run(_try_all(config, cases))
    console = Console(highlight=False)
    kinds = Counter(case.kind for case in cases)
    console.print(f"{len(cases)} responses: " + ", ".join(f"{amount} {KINDS[kind]}" for kind, amount in kinds.items()))
    console.print(_table(parts))
    for line in [*_answers(parts), *_failures(parts), *_doubts(parts)]:
        console.print(line, soft_wrap=True)
    return not any(part.failures for part in parts)


def generic_cases(config: Config, count: int) -> Iterator[Case]:
    """The reference answers of the first `count` prompts of the run, where there are any, and wrong ones for each."""
    source = PromptSource(config.data, config.model, config.sampling, seed=config.run.seed)
    for ticket in range(1, min(count, len(source.rows)) + 1):
        prompt = source.prompt(ticket)
        reference = next((prompt.row[name] for name in REFERENCES if name in prompt.row), None)
        if reference is not None:
            yield Case("reference", RewardInput(prompt=prompt.text, response=str(reference), row=prompt.row))
        for text in WRONG:
            yield Case("wrong", RewardInput(prompt=prompt.text, response=text, row=prompt.row))


def sample_cases(config: Config, path: Path, count: int) -> Iterator[Case]:
    """The newest `count` responses of a run directory, or the first of a JSONL file with `response` and the row's columns."""
    if path.is_dir():
        records, finder = load_rows(str(RunDirectory(path).samples)), _RowFinder(config)
        chosen = range(len(records))[-count:]
    else:
        records, finder = load_rows(str(path)), None
        chosen = range(len(records))[:count]
    for index in chosen:
        record = records[index]
        if not isinstance(record.get("response"), str):
            raise DataError(f"{records.place(index)}: no text in column `response`; it has {', '.join(record)}")
        row = finder.row(record) if finder else record
        prompt = str(record.get("prompt") or record.get(config.data.prompt_field) or "")
        given = RewardInput(
            prompt=prompt, response=record["response"], row=row, truncated=record.get("finish_reason") == "length"
        )
        yield Case("sample", given)


class _RowFinder:
    """From a recorded rollout back to the row that its ticket stood for."""

    def __init__(self, config: Config) -> None:
        self._train = load_rows(config.data.train, config.data.split)
        self._plan = SamplePlan(len(self._train), seed=config.run.seed, shuffle=config.data.shuffle)
        self._eval: Rows | None = load_rows(config.data.eval, config.data.eval_split) if config.data.eval else None
        self._prompts = config.eval.prompts

    def row(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        ticket = int(record["ticket_id"])
        if record.get("kind") == "eval" and self._eval is not None:
            return self._eval[(ticket - 1) % min(self._prompts, len(self._eval))]
        return self._train[self._plan.at(ticket).row]


async def _try_all(config: Config, cases: Sequence[Case]) -> list[Tried]:
    return [await _try_part(config, function, cases) for function in config.reward.functions]


async def _try_part(config: Config, function: RewardFunctionConfig, cases: Sequence[Case]) -> Tried:
    alone = config.reward.model_copy(update={"functions": (function,), "workers": 1})
    pool, tried, timeouts = RewardPool(alone, config.run.root), Tried(function), 0
    try:
        await pool.start()
        for index, case in enumerate(cases):
            started_s = time.perf_counter()
            try:
                (score,) = await pool.score([case.given])
            except RewardError as error:
                tried.failures[f"{case.kind}: {error}"] += 1
                timeouts += "took longer than" in str(error)
            else:
                tried.scores.setdefault(case.kind, []).append(score.parts[function.part])
                tried.answers.append(score.answer)
            tried.seconds.append(time.perf_counter() - started_s)
            if timeouts == TIMEOUTS:
                tried.untried = len(cases) - index - 1
                break
    finally:
        await asyncio.sleep(0.0 if tried.failures else PRINTED_S)  # what it printed is read beside its answers
        tried.printed = pool.printed
        await pool.close()
    return tried


def _table(parts: Sequence[Tried]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("part", "weight", "on", "mean", "min", "max", "p50 ms", "max ms", "failed"):
        table.add_column(title, justify="left" if title in ("part", "on") else "right")
    for part in parts:
        times = [f"{1000 * value:.1f}" for value in (statistics.median(part.seconds), max(part.seconds))]
        head = [part.function.part, f"{part.function.weight:g}"]
        tail = [*times, f"{part.failures.total()}"]
        for kind, values in part.scores.items() or {"nothing": []}.items():
            figures = [number(f(values)) if values else "-" for f in (statistics.fmean, min, max)]
            table.add_row(*head, kind, *figures, *tail)
            head, tail = ["", ""], ["", "", ""]
    return table


def _answers(parts: Sequence[Tried]) -> Iterator[Text]:
    for part in parts:
        found = [answer for answer in part.answers if answer]
        if any(answer is not None for answer in part.answers):
            shown = ", ".join(f"`{visible(answer)}`" for answer in list(dict.fromkeys(found))[:3])
            like = f", like {shown}" if shown else ""
            yield Text(f"{part.function.part} finds an answer in {len(found)} of {len(part.answers)} responses{like}")


def _failures(parts: Sequence[Tried]) -> Iterator[Text]:
    for part in parts:
        for message, amount in part.failures.most_common():
            yield Text(f"{amount} x on {visible(message)}", "red")
        if part.untried:
            yield Text(f"{part.function.part}: {part.untried} more responses were not tried after {TIMEOUTS} time-outs", "red")


def _doubts(parts: Sequence[Tried]) -> Iterator[Text]:
    """Parts that see no difference where there is one, and what they printed."""
    for part in parts:
        name, right, wrong = part.function.part, part.scores.get("reference"), part.scores.get("wrong")
        scores = [score for values in part.scores.values() for score in values]
        if len(scores) > 1 and min(scores) == max(scores):
            unknown = "" if right else f" None of the columns {', '.join(REFERENCES)} is there for a reference answer."
            yield Text(
                f"{name} gives every response {number(scores[0])}, whatever it is: from equal rewards nothing is learned; it "
                f"should tell good answers from bad ones.{unknown}",
                "yellow",
            )
        elif right and wrong and statistics.fmean(right) <= statistics.fmean(wrong):
            yield Text(
                f"{name} gives the reference answers no more than wrong ones: fine for a part about form; else it may expect "
                "another format than that of the data",
                "yellow",
            )
        if part.printed:
            yield Text(f"{name} printed: {visible(part.printed)}", "dim")
