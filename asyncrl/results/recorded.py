"""`asyncrl samples` and `asyncrl logs`: rollouts and log lines of a run, also new ones until it is over."""

import heapq
import json
import math
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

from asyncrl.errors import RunError
from asyncrl.run.directory import RunDirectory, find_run
from asyncrl.telemetry.base import SampleRecord, sample_from
from asyncrl.telemetry.jsonl import Tail, Tails
from asyncrl.telemetry.state import read_state
from asyncrl.telemetry.text import number, visible_lines

T = TypeVar("T")

KINDS = {"train": "trained", "eval": "held-out", "dropped": "dropped"}
FOLLOWED_BYTES = 1 << 20  # samples to follow are chosen from this much of the end of the file
LAST_BYTES = 1 << 20  # output is shown from so much before its end
FOLLOW_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A selection of samples."""

    count: int
    step: int | None = None
    kind: str | None = None  # train | eval | dropped; None is all, but of best and worst only train
    order: Literal["newest", "best", "worst"] = "newest"  # best and worst by reward; of equals the newest

    def rank(self, sample: SampleRecord) -> float | None:
        """Return a number that is higher for what is shown before other samples; None if it is not shown."""
        kind = self.kind or (None if self.order == "newest" else "train")
        if self.step not in (None, sample.step) or kind not in (None, sample.kind):
            return None
        if self.order == "newest":
            return 0.0
        if math.isnan(sample.reward):
            return None
        return sample.reward if self.order == "best" else -sample.reward


def choose(samples: Iterable[SampleRecord], *wanted: Wanted) -> list[list[SampleRecord]]:
    """Return each selection from one pass over the samples: the first first, the newest as in the file."""
    kept: list[list[tuple[float, int, SampleRecord]]] = [[] for _ in wanted]
    for index, sample in enumerate(samples):
        for one, heap in zip(wanted, kept, strict=True):
            if (rank := one.rank(sample)) is not None:
                heapq.heappush(heap, (rank, index, sample))
                if len(heap) > one.count:
                    heapq.heappop(heap)
    return [
        [sample for *_, sample in sorted(heap, reverse=one.order != "newest")]
        for one, heap in zip(wanted, kept, strict=True)
    ]


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
    order: Literal["newest", "best", "worst"] = "best" if best else "worst" if worst else "newest"
    return Wanted(count=count, step=step, kind="dropped" if dropped else kind, order=order)


def samples_of(run: Path | None, wanted: Wanted, *, follow: bool) -> Iterable[SampleRecord]:
    """Return the selected samples, with `follow` also new ones until the run ends; without any, RunError."""
    directory = find_run(run)
    if follow and wanted.order != "newest":
        raise RunError(f"--follow shows samples as they come, --{wanted.order} needs all of them; choose one")
    if follow:
        new = Tail(directory.samples, last_bytes=FOLLOWED_BYTES)
        (chosen,) = choose(map(sample_from, new), wanted)
        later = _until_over(directory, lambda: map(sample_from, new))
        return chain(chosen, (sample for sample in later if wanted.rank(sample) is not None))
    (chosen,) = choose(recorded_samples(directory, wanted), wanted)
    if chosen:
        return chosen
    if wanted.kind == "eval":
        steps = ", ".join(map(str, evaluated_steps(directory))) or "none"
        raise RunError(f"{directory.evaluations} has no such sample; the steps that it has: {steps}")
    hint = "telemetry.samples_per_step are written after each step"
    raise RunError(f"{directory.samples} has no such sample; {hint}")


def recorded_samples(directory: RunDirectory, wanted: Wanted) -> Iterator[SampleRecord]:
    """Yield samples of a run: of the kind `eval` all of one evaluation, by default the newest."""
    if wanted.kind != "eval":
        return map(sample_from, Tail(directory.samples))
    steps = evaluated_steps(directory) if wanted.step is None else [wanted.step]
    files = sorted(directory.evaluations.rglob(directory.evaluation(steps[-1]).name)) if steps else []
    return map(sample_from, chain.from_iterable(map(Tail, files)))


def evaluated_steps(directory: RunDirectory) -> list[int]:
    """Return the steps of the evaluations whose samples were written; before others those set aside since."""
    names = {path.stem.removeprefix("step-") for path in directory.evaluations.rglob("step-*.jsonl")}
    rows = read_state(directory.path).history.rows
    valid = {step for step, row in rows.items() if any(name.startswith("eval/") for name in row)}
    return sorted((int(name) for name in names if name.isdecimal()), key=lambda step: (step in valid, step))


def pairs_of(run: Path | None) -> Iterator[str]:
    """Yield the preferences of a run as JSON lines, with TRL's columns only. Without any, raise RunError."""
    path = find_run(run).pairs
    if not path.exists():
        raise RunError(f"found no {path}; a run with telemetry.pairs: true writes it")
    for record in Tail(path):
        yield json.dumps({name: record[name] for name in ("prompt", "chosen", "rejected")})


def sample_head(sample: SampleRecord) -> tuple[str, str]:
    """Return (step, kind and reward of a sample; all other details but its text)."""
    head = f"step {sample.step}, {KINDS.get(sample.kind, sample.kind)} {sample.eval_set}".rstrip()
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


def logs_of(run: Path | None, name: str | None, *, follow: bool) -> Iterator[str]:
    """Yield text of a run's logs, with `follow` also what comes until the run ends.

    With `name`, the last MiB that this process or host has printed; without, the warnings and errors of all
    processes in the order of their times. Raises RunError for a name that has no log.
    """
    directory = find_run(run)
    tails = Tails(directory.logs)

    def warnings() -> Iterator[str]:
        told = (one for new in tails.read().values() for one in new if one.get("level", "info") != "info")
        for record in sorted(told, key=lambda record: str(record.get("time"))):
            at, process, level, event = (
                str(record.get(key)) for key in ("time", "process", "level", "event")
            )
            said = visible_lines("\n".join(filter(None, (event, record.get("exception")))))
            yield f"{at[:19]} {process} {level.upper()} {said}\n"

    read: Callable[[], Iterable[str]] = warnings if name is None else _printed(directory, name)
    return _until_over(directory, read) if follow else iter(read())


def _printed(directory: RunDirectory, name: str) -> Callable[[], list[str]]:
    path = directory.logs / f"{name}.out"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in directory.logs.glob("*.out"))) or "none"
        raise RunError(
            f"{directory.logs} has no output of `{name}`; it has that of: {names}. A host that does not "
            "share this directory has its own: call `asyncrl logs` there"
        )
    position, decoder = max(path.stat().st_size - LAST_BYTES, 0), getincrementaldecoder("utf-8")("replace")

    def read() -> list[str]:
        nonlocal position
        with path.open("rb") as file:
            file.seek(position)
            found = file.read()
        position += len(found)
        return [text] if (text := decoder.decode(found)) else []

    return read


def _until_over(directory: RunDirectory, read: Callable[[], Iterable[T]]) -> Iterator[T]:
    """Yield what `read` returns, every `FOLLOW_S` seconds until the run is over."""
    while True:
        is_up = directory.is_up  # before reading, so that the last ones are shown
        yield from read()
        if not is_up:
            return
        time.sleep(FOLLOW_S)
