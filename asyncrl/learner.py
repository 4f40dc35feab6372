"""The learner: take groups, measure, plan, step, publish. It waits for groups and for nothing else.

consumes  groups    from  intake            waits until the groups of one step have arrived
produces  weights   to    weights.publish   a copy, which generators get while training goes on
produces  credit    to    buffer            with the version; generators in buffer.lease wait for it
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from asyncrl.batch.hooks import Hooks
from asyncrl.batch.plan import Plan
from asyncrl.batch.recipe import Recipe
from asyncrl.buffer.intake import Collected
from asyncrl.hosting.progress import Pace, begin
from asyncrl.stopwatch import Span, Stopwatch
from asyncrl.trainer.base import StepResult, Trainer

log = logging.getLogger(__name__)


class Run(Protocol):
    """What surrounds the loop. Every rank calls every method; what only one rank can do happens on rank 0."""

    def collect(self, version: int) -> Collected:
        """Return the groups of the step that trains `version`, the same on every rank."""

    def publish(self, version: int) -> None:
        """Make the trainer's weights the newest, and open the credit of `version`."""

    def report(self, step: "Step") -> None:
        """Write metrics and samples, and take in evaluation rounds."""

    def checkpoint(self, version: int, *, last: bool) -> None:
        """Save when it is due, then let the store forget what the oldest kept checkpoint holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One finished step, for reports and hooks. Mappings have the names under which metrics are published."""

    version: int  # the version that the step made
    collected: Collected
    plan: Plan
    results: tuple[StepResult, ...]  # of the policy's optimizer steps; empty while only the critic learns
    critic_results: tuple[StepResult, ...] = ()
    seconds: Mapping[str, float]
    spans: Sequence[Span] = ()  # the parts of the step in their order, which `seconds` adds up
    coefficients: Mapping[str, float] = field(default_factory=dict)  # those that this step used
    hook_metrics: Mapping[str, float] = field(default_factory=dict)  # in `after_step`, those of `before_step`


def run_learner(
    trainer: Trainer, run: Run, recipe: Recipe, hooks: Hooks, *, version: int, steps: int
) -> None:
    """Train from `version` to `steps`. All ranks run this, with collectives in the same order."""
    planner = recipe.planner
    begin("publish")
    run.publish(version)
    while version < steps:
        clock = Stopwatch()
        with clock.time("wait_groups"):
            collected = run.collect(version)
        with clock.time("measure"):
            samples = planner.assemble(collected.groups, version)
            measured = planner.measure(trainer, samples)
        with clock.time("plan"):
            plan = planner.plan(collected.groups, samples, measured, recipe.coefficients.kl)
        with clock.time("hooks", Pace.SLOW):
            hook_metrics = hooks.before_step(plan)
        with clock.time("critic"):
            critic_results = recipe.critic.train(trainer, plan) if recipe.critic else ()
        with clock.time("train"):
            coefficients = recipe.coefficients.metrics()
            results = recipe.train_policy(trainer, plan, version)
        version += 1
        with clock.time("publish"):
            run.publish(version)
        step = Step(
            version=version,
            collected=collected,
            plan=plan,
            results=results,
            seconds=clock.seconds,
            spans=clock.spans,
            critic_results=critic_results,
            coefficients=coefficients,
            hook_metrics=hook_metrics,
        )
        with clock.time("hooks", Pace.SLOW):
            after = hooks.after_step(step)
        begin("report")
        run.report(replace(step, hook_metrics={**hook_metrics, **after}))
        begin("checkpoint", Pace.SLOW)
        run.checkpoint(version, last=version == steps)
