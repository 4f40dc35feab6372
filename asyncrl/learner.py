"""The learner: take groups, plan, step, publish. It waits for groups and for nothing else.

consumes  groups    from  intake            waits until one step's groups are there
produces  weights   to    weights.publish   a copy; senders deliver it, training goes on
produces  credit    to    buffer            through the version: unblocks generators in buffer.lease
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.buffer.intake import Collected
from asyncrl.trainer.base import StepResult, Trainer
from asyncrl.trainer.objective import Objective
from asyncrl.trainer.plan import Minibatch, Plan

log = logging.getLogger(__name__)


class Run(Protocol):
    """What surrounds the loop. Every rank calls every method; what only one rank can do happens on rank 0."""

    def collect(self, version: int) -> Collected:
        """The groups of the step that trains `version`; the same on every rank."""
        ...

    def publish(self, version: int) -> None:
        """Make the trainer's weights the newest, and open the credit of `version`."""
        ...

    def report(self, step: "Step") -> None:
        """Metrics, samples, evaluation rounds."""
        ...

    def checkpoint(self, version: int, *, last: bool) -> None:
        """Save when it is due, then let the store forget what the oldest kept checkpoint holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One finished step, for reporting."""

    version: int
    """After the step."""
    collected: Collected
    plan: Plan
    results: tuple[StepResult, ...]
    seconds: Mapping[str, float]


@dataclass(slots=True)
class Stopwatch:
    """Seconds by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, name: str) -> Any:
        """Add the block's duration to `name`."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started_s


def run_learner(
    trainer: Trainer,
    run: Run,
    objective: Objective,
    plan: Callable[[Collected, int], Plan],
    *,
    version: int,
    steps: int,
    epochs: int,
) -> None:
    """Train from `version` to `steps`. Every rank runs this; collectives happen in the same order on all."""
    run.publish(version)
    while version < steps:
        clock = Stopwatch()
        with clock.time("wait_groups"):
            collected = run.collect(version)
        with clock.time("plan"):
            batch = plan(collected, version)
        with clock.time("proximal"):
            minibatches = [
                Minibatch(microbatches=objective.fill(trainer, minibatch.microbatches), counts=minibatch.counts)
                for minibatch in batch.minibatches
            ]
        with clock.time("train"):
            results = tuple(
                trainer.step(minibatch.microbatches, objective.loss(minibatch.counts))
                for _ in range(epochs)
                for minibatch in minibatches
            )
        version += 1
        with clock.time("publish"):
            run.publish(version)
        run.report(Step(version=version, collected=collected, plan=batch, results=results, seconds=clock.seconds))
        run.checkpoint(version, last=version == steps)
