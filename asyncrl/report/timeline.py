"""What the learner knows of a run's timeline: its own steps, the life of every group, the weights' way to
each generator.

Times come from the clock of the process that acted. The moments of a group are put in order: if the clocks of
two hosts differ, a span of its life is shorter or longer than it was, and never negative.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from asyncrl.best_effort import BestEffort
from asyncrl.learner import Step
from asyncrl.telemetry.trace import TraceWriter
from asyncrl.types import Group
from asyncrl.weights.base import UpdateReport

LEARNER, STEPS, WEIGHTS = "learner", "steps", "weights"
# The life of a group: waiting for weights, sampled, scored, handed over, waiting in the store, waiting for
# the step, trained.
LIFE = ("leased", "sampling", "reward", "put", "in queue", "taken", "trained")


class Timeline:
    """Written as it happens. What cannot be written is left out with one message, the next is tried again;
    the run goes on."""

    def __init__(self, path: Path | None) -> None:
        """None: nothing is written."""
        self._path = path
        self._trace: TraceWriter | None = None
        self._may_fail = BestEffort()
        self._write(lambda trace: None)

    def step(self, step: Step) -> None:
        """A step that has just ended, with its parts and the groups that it took."""
        self._write(lambda trace: trace_step(trace, step))

    def update(self, generator_id: str, report: UpdateReport) -> None:
        """An update that a generator has just reported."""
        self._write(lambda trace: trace_update(trace, generator_id, report))

    def checkpoint(self, version: int, seconds: float) -> None:
        """A checkpoint that has just been saved."""
        now_at = time.time()
        self._write(
            lambda trace: trace.slice(LEARNER, STEPS, f"checkpoint {version}", now_at - seconds, now_at)
        )

    def close(self) -> None:
        """Close the file."""
        self._path = None
        if self._trace:
            with self._may_fail("closing the timeline"):
                self._trace.close()

    def _write(self, write: Callable[[TraceWriter], None]) -> None:
        """Two threads call this: the learner's and the control plane's."""
        if path := self._path:
            with self._may_fail("writing the timeline"):
                self._try(write, path)

    def _try(self, write: Callable[[TraceWriter], None], path: Path) -> None:
        trace = self._trace = self._trace or TraceWriter(path)
        try:
            write(trace)
        except OSError:
            self._trace = None  # the file may end within a line, which opening it mends
            with contextlib.suppress(OSError):
                trace.close()
            raise


def trace_step(trace: TraceWriter, step: Step) -> None:
    """The step with its parts, and the groups that it took."""
    spans = [(span.name, span.started_at, span.started_at + span.duration_s) for span in step.spans]
    if not spans:
        return
    (_, started_at, _), (_, _, ended_at) = spans[0], spans[-1]
    trace.slice(
        LEARNER, STEPS, f"step {step.version}", started_at, ended_at, groups=len(step.collected.groups)
    )
    for span in spans:
        trace.slice(LEARNER, STEPS, *span)
    training = next((start, end) for name, start, end in spans if name == "train")
    for group in step.collected.groups:
        _trace_group(trace, step, group, training, f"trained in step {step.version}")
    for group, reason in step.collected.rejected:
        _trace_group(trace, step, group, (), f"rejected: {reason}")


def _trace_group(
    trace: TraceWriter, step: Step, group: Group, training: Sequence[float], outcome: str
) -> None:
    times, taken_at = group.times, step.collected.taken_at.get(group.ticket_id)
    if times is None or taken_at is None:
        return
    sampled_at = times.sampling_at + group.sampling_s
    known = [
        times.leased_at,
        times.sampling_at,
        sampled_at,
        sampled_at + group.reward_s,
        times.put_at,
        taken_at,
        *training,
    ]
    moments = list(accumulate(known, max))
    versions = [span.version for rollout in group.rollouts for span in rollout.version_spans]
    details = {
        "outcome": outcome,
        "oldest_version": min(versions, default=-1),
        "newest_version": max(versions, default=-1),
    }
    process, track = group.generator_id, trace.lane(group.generator_id, moments[0], moments[-1])
    trace.slice(process, track, f"group {group.ticket_id}", moments[0], moments[-1], **details)
    for name, (start_at, end_at) in zip(LIFE, pairwise(moments), strict=False):
        trace.slice(process, track, name, start_at, end_at)


def trace_update(trace: TraceWriter, generator_id: str, report: UpdateReport) -> None:
    """An update that ends now."""
    now_at = time.time()
    details = {
        "outcome": report.reason or "applied",
        "paused_s": report.paused_s,
        "probe_max": report.probe_max,
    }
    trace.slice(
        generator_id, WEIGHTS, f"version {report.version}", now_at - report.transfer_s, now_at, **details
    )
