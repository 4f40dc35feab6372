"""`asyncrl samples`: the newest, best, worst or dropped rollouts of a run, or new ones as they come."""

import heapq
import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.errors import RunError
from asyncrl.results.archive import read_samples
from asyncrl.run.directory import RunDirectory, find_run
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.history import Tail, json_object
from asyncrl.telemetry.state import sample_from
from asyncrl.telemetry.status import read_status
from asyncrl.telemetry.text import number

KINDS = {"train": "trained", "eval": "held-out", "dropped": "dropped"}
FOLLOW_S = 0.5
FOLLOWED_BYTES = 1 << 20  # `follow` looks through at most this much of the end of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A selection of samples."""

    count: int
    step: int | None = None
    kind: str | None = None  # train | eval | dropped
    order: Literal["newest", "best", "worst"] = "newest"  # best and worst by reward; of equals the newest

    def fits(self, sample: SampleRecord) -> bool:
        """Return whether the sample has the step and kind."""
        return self.step in (None, sample.step) and self.kind in (None, sample.kind)

    def choose(self, samples: Iterable[SampleRecord]) -> list[SampleRecord]:
        """Return the first `count` samples in this order, in one pass; the newest as in the file."""
        fitting = filter(self.fits, samples)
        if self.order == "newest":
            return list(deque(fitting, maxlen=self.count))
        sign = 1.0 if self.order == "best" else -1.0
        scored = (sample for sample in fitting if not math.isnan(sample.reward))
        ranked = ((sign * sample.reward, index, sample) for index, sample in enumerate(scored))
        return [sample for _, _, sample in heapq.nlargest(self.count, ranked, key=lambda item: item[:2])]


def wanted(
    count: int, step: int | None, kind: str | None, *, best: bool, worst: bool, dropped: bool
) -> Wanted:
    """Return the selection that the command's options ask for. Raises RunError if they contradict another."""
    if best + worst + dropped > 1:
        raise RunError("--best, --worst and --dropped exclude each other; choose one")
    if kind not in (None, *KINDS):
        raise RunError(f"--kind {kind}: allowed are {', '.join(KINDS)}")
    if dropped and kind not in (None, "dropped"):
        raise RunError(f"--dropped with --kind {kind}: leave one out")
    if dropped:
        return Wanted(count=count, step=step, kind="dropped")
    if best or worst:  # held-out samples have other rewards: they are mixed in only if asked for
        return Wanted(count=count, step=step, kind=kind or "train", order="best" if best else "worst")
    return Wanted(count=count, step=step, kind=kind)


def samples_of(run: Path | None, wanted: Wanted, *, follow: bool) -> Iterable[SampleRecord]:
    """Return the selected samples, with `follow` also new ones until the run ends; without any, RunError."""
    directory = find_run(run)
    if follow and wanted.order != "newest":
        raise RunError(f"--follow shows samples as they come, --{wanted.order} needs all of them; choose one")
    if follow:
        return _followed(directory, wanted)
    if chosen := wanted.choose(recorded(directory, wanted)):
        return chosen
    if wanted.kind == "eval":
        steps = ", ".join(map(str, evaluated_steps(directory))) or "none"
        raise RunError(f"{directory.evaluations} has no such sample; the steps that it has: {steps}")
    hint = "telemetry.samples_per_step are written after each step"
    raise RunError(f"{directory.samples} has no such sample; {hint}")


def recorded(directory: RunDirectory, wanted: Wanted) -> Iterator[SampleRecord]:
    """Yield samples of a run: of the kind `eval` all of one evaluation, by default the newest."""
    if wanted.kind != "eval":
        return read_samples(directory.samples)
    steps = evaluated_steps(directory) if wanted.step is None else [wanted.step]
    return read_samples(directory.evaluation(steps[-1])) if steps else iter(())


def evaluated_steps(directory: RunDirectory) -> list[int]:
    """Return the steps of the evaluations whose samples were written."""
    names = (path.stem for path in directory.evaluations.glob("step-[0-9]*.jsonl"))
    return sorted(int(name.removeprefix("step-")) for name in names)


def pairs_of(run: Path | None) -> Iterator[str]:
    """Yield the preferences of a run as JSON lines, with TRL's columns only. Without any, raise RunError."""
    path = find_run(run).pairs
    if not path.exists():
        raise RunError(f"found no {path}; a run with telemetry.pairs: true writes it")
    with path.open("rb") as file:
        for line in file:
            if record := json_object(line):
                yield json.dumps({name: record[name] for name in ("prompt", "chosen", "rejected")})


def _followed(directory: RunDirectory, wanted: Wanted) -> Iterator[SampleRecord]:
    tail = Tail(directory.samples, last_bytes=FOLLOWED_BYTES)
    yield from wanted.choose(map(sample_from, tail.read()))
    while True:
        status = read_status(directory.status)  # before reading, so that the last samples are shown
        yield from filter(wanted.fits, map(sample_from, tail.read()))
        if status and status.is_final:
            return
        time.sleep(FOLLOW_S)


def sample_head(sample: SampleRecord) -> tuple[str, str]:
    """Return (step, kind and reward of a sample; all other details but its text)."""
    head = f"step {sample.step}, {KINDS.get(sample.kind, sample.kind)}"
    head += f" ({sample.reason})" if sample.reason else ""
    head += f": reward {number(sample.reward)}" if not math.isnan(sample.reward) else ""
    is_trained = sample.kind == "train" and not math.isnan(sample.advantage)
    spans = ", ".join(f"v{version} {tokens}" for version, tokens in sample.versions)
    details = (
        f"answer {sample.answer}" if sample.answer else "",
        ", ".join(f"{name} {number(value)}" for name, value in sample.parts.items()),
        f"advantage {number(sample.advantage)}" if is_trained else "",
        f"tokens by version: {spans}" if spans else "",
        sample.finish_reason,
        sample.generator_id,
        f"ticket {sample.ticket_id}",
        f"prompt {sample.prompt_number}" if sample.prompt_number else "",
    )
    return head, " · ".join(detail for detail in details if detail)
