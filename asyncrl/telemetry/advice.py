"""What is being waited for, who waits for whom, and what to do about it, in numbers.

In a steady state both sides handle the same groups per second, X. A side that is idle for a share w of the time could handle
X / (1 - w). So n generators that wait for a share g beside a learner that waits for a share l do the work of n (1 - g) busy ones,
and n (1 - g) / (1 - l) would keep the learner busy.
"""

import math

from asyncrl.telemetry.state import DashboardState

WAITING = 0.3
"""A share of idle time worth a word."""
PAUSED = 0.15
BUSY = 0.1
"""A learner that waits less than this has groups in store."""
QUEUED_STEPS = 1.0
"""Age that groups gain by waiting for the learner, in steps."""
MOST_TIMES = 3
"""More generators than this many times those of now are not advised in one go: rates change with the number."""


FIRST_STEPS = 3
"""Start-up counts as waiting in the first ones, so they say nothing."""


def waiting_for(state: DashboardState) -> str | None:
    """What the next step needs and has not got; None when the run is over."""
    status = state.status
    if status is None:
        return f"no step yet: waiting for the learner{_doing(state, 'learner')}"
    if status.is_final:
        return None
    if status.state == "evaluating":
        return "waiting for the evaluation of the last weights"
    if not state.members:
        others = [name for name in state.doing if name not in ("learner", "supervisor")]
        return "waiting for the first generator: " + ("; ".join(f"{n}{_doing(state, n)}" for n in others) or "none has started")
    dirty = [member.generator_id for member in state.members if member.state == "dirty"]
    if len(dirty) == len(state.members):
        return f"no generator has weights that it may sample with ({', '.join(dirty)}): each update failed, the log says why"
    audit = status.audit
    groups = f": {audit.ready} are ready, {audit.leased} are being sampled" if audit else ""
    return f"waiting for the groups of step {state.step + 1}{groups}"


def _doing(state: DashboardState, process: str) -> str:
    return f" ({state.doing[process]})" if process in state.doing else ""


def bottleneck(state: DashboardState) -> str:
    """One sentence from the idle shares: the slow part is the one that never waits."""
    learner, paused = state.idle_learner, state.paused_generators
    if learner is None or len(state.series("idle/learner")) < FIRST_STEPS:
        return waiting_for(state) or "no step was made"
    if state.members and all(member.state == "dirty" for member in state.members):
        return waiting_for(state) or ""
    idle = state.idle_generators or 0.0
    if paused is not None and paused > PAUSED:
        return f"generators stand still {paused:.0%} for weight updates: train larger batches"
    if learner > WAITING and idle > WAITING:
        return f"learner waits {learner:.0%}, generators {idle:.0%}: raise staleness.max_lag or window_groups"
    if learner > WAITING:
        return f"learner waits {learner:.0%} of the time: {_more(len(state.members), idle, learner)}"
    if idle > WAITING:
        return f"generators wait {idle:.0%} of the time: {_fewer(len(state.members), idle, learner)}"
    queued = state.latest("staleness/in_queue") or 0.0
    if queued >= QUEUED_STEPS and learner < BUSY:
        return f"rollouts wait {queued:.1f} steps in the queue: lower staleness.max_lag by {int(queued)}"
    return "balanced: neither side waits much"


def _needed(count: int, idle: float, learner: float) -> int:
    """Generators that would keep the learner just busy."""
    return max(1, math.ceil(count * (1 - idle) / max(1 - learner, 1e-6) - 1e-9))


def _more(count: int, idle: float, learner: float) -> str:
    if not count:
        return "add generators"
    missing = max(1, _needed(count, idle, learner) - count)
    if missing > MOST_TIMES * count:
        return f"far too few; begin with generators=+{MOST_TIMES * count}"
    return f"add {missing} generator{'s' * (missing > 1)} (asyncrl scale generators=+{missing})"


def _fewer(count: int, idle: float, learner: float) -> str:
    needed = _needed(count, idle, learner)
    return f"{needed} of {count} would do, or add learner.ranks" if needed < count else "add learner.ranks"
