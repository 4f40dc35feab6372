"""`asyncrl samples`: rollouts of a run to read, the newest, the best, the worst, those that were dropped, or as they come."""

import heapq
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from asyncrl.errors import RunError
from asyncrl.results.archive import read_samples
from asyncrl.results.sample import KINDS, full_lines
from asyncrl.run.directory import RunDirectory, find_run
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.history import Tail
from asyncrl.telemetry.state import sample_from
from asyncrl.telemetry.status import read_status

FOLLOW_S = 0.5
FOLLOWED_BYTES = 1 << 20  # of what was there before, at most so much is looked through


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which samples."""

    count: int
    step: int | None = None
    kind: str | None = None  # train | eval | dropped
    order: Literal["newest", "best", "worst"] = "newest"  # best and worst are by reward; of equals the newest

    def fits(self, sample: SampleRecord) -> bool:
        """Whether it is of the step and kind."""
        return (self.step is None or sample.step == self.step) and (self.kind is None or sample.kind == self.kind)

    def choose(self, samples: Iterable[SampleRecord]) -> list[SampleRecord]:
        """At most `count`, in one pass; the newest come in the order in which they were written."""
        fitting = filter(self.fits, samples)
        if self.order == "newest":
            return list(deque(fitting, maxlen=self.count))
        sign = 1.0 if self.order == "best" else -1.0
        ranked = ((sign * sample.reward, index, sample) for index, sample in enumerate(fitting) if not math.isnan(sample.reward))
        return [sample for _, _, sample in heapq.nlargest(self.count, ranked, key=lambda item: item[:2])]


def wanted(count: int, step: int | None, kind: str | None, *, best: bool, worst: bool, dropped: bool) -> Wanted:
    """What the options of the command mean. Raises RunError where they contradict each other."""
    if best + worst + dropped > 1:
        raise RunError("--best, --worst and --dropped exclude each other; choose one")
    if kind not in (None, *KINDS):
        raise RunError(f"--kind {kind}: allowed are {', '.join(KINDS)}")
    if dropped and kind not in (None, "dropped"):
        raise RunError(f"--dropped with --kind {kind}: leave one out")
    if dropped:
        return Wanted(count=count, step=step, kind="dropped")
    if best or worst:  # evaluation samples otherwise: not to be mixed unless asked for
        return Wanted(count=count, step=step, kind=kind or "train", order="best" if best else "worst")
    return Wanted(count=count, step=step, kind=kind)


def show_samples(run: Path | None, wanted: Wanted, *, follow: bool) -> None:
    """Print them; with `follow` go on with what the run writes, until it is over. Raises RunError when there are none."""
    directory = find_run(run)
    if follow and wanted.order != "newest":
        raise RunError(f"--follow shows samples as they come, --{wanted.order} needs all of them; choose one")
    console = Console(highlight=False)
    if follow:
        for sample in _followed(directory, wanted):
            _print(console, sample)
        return
    chosen = wanted.choose(read_samples(directory.samples))
    if not chosen:
        raise RunError(f"{directory.samples} holds no such sample; telemetry.samples_per_step are written after each step")
    for sample in chosen:
        _print(console, sample)


def _print(console: Console, sample: SampleRecord) -> None:
    for line in full_lines(sample):
        console.print(line, soft_wrap=True)


def _followed(directory: RunDirectory, wanted: Wanted) -> Iterator[SampleRecord]:
    tail = Tail(directory.samples, last_bytes=FOLLOWED_BYTES)
    yield from wanted.choose(map(sample_from, tail.read()))
    while True:
        status = read_status(directory.status)  # before reading, so that the last samples are shown
        yield from filter(wanted.fits, map(sample_from, tail.read()))
        if status and status.is_final:
            return
        time.sleep(FOLLOW_S)
