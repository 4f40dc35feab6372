"""Which side of a run waits for the other, and how many generators would remove the bottleneck.

In a steady state generators and learner handle the same number X of groups per second. A side that is idle
for a share w of the time could handle X / (1 - w). So n generators that are idle for a share g do the work of
n (1 - g) busy ones, and n (1 - g) / (1 - l) generators would keep busy a learner that is idle for a share l.
"""

import math

from asyncrl.telemetry.state import RunView
from asyncrl.telemetry.text import duration

WAITING = 0.3  # an idle share that is worth advice
PAUSED = 0.15  # the same for the time that generators pause for weight updates
BUSY = 0.1  # a learner that waits less than this finds groups in the queue
QUEUED_STEPS = 1.0  # steps by which groups age in the queue before it is worth advice
MOST_TIMES = 3  # advise at most this many times the current generators: rates change with their number
FIRST_STEPS = 3  # steps since the start before there is advice
WAITS = ("", "wait_groups")  # what a learner does, in its status, while it waits for groups


def waiting_for(state: RunView) -> str | None:
    """Return what the next step is waiting for, in one sentence; None when the run is over."""
    status = state.status
    if status is None:
        return f"no step yet: waiting for the learner{_doing(state, 'learner')}"
    if status.is_final:
        return None
    if status.state == "evaluating":
        return "waiting for the evaluation of the last weights"
    if not state.members and not state.is_stage:
        others = (name for name in state.doing if name not in ("learner", "supervisor"))
        starting = "; ".join(name + _doing(state, name) for name in others)
        return f"waiting for the first generator: {starting or 'none has started'}"
    dirty = [member.generator_id for member in state.members if member.state == "dirty"]
    if dirty and len(dirty) == len(state.members):
        names = ", ".join(dirty)
        return f"no generator has complete weights ({names}): each update failed, the log says why"
    if state.is_stage or status.doing not in WAITS:
        begun_at = max((row.get("time", 0.0) for row in state.recent("time/step")), default=0.0)
        if state.is_stage and status.state == "training":  # it has a row after several steps only
            begun_at = status.updated_at
        since = f" for {duration(state.now - begun_at)}" if begun_at >= status.started_at else ""
        return f"training on step {state.step + 1}{since} (now: {status.doing.replace('_', ' ')})"
    audit = status.audit
    groups = f": {audit.ready} are ready, {audit.leased} are being sampled" if audit else ""
    if audit and state.step == 0 and (failed := audit.counters.get("failed", 0)):
        groups += f", {failed} attempts failed: see the warnings of the generators"
    return f"waiting for the groups of step {state.step + 1}{groups}"


def _doing(state: RunView, process: str) -> str:
    return f" ({state.doing[process]})" if process in state.doing else ""


def bottleneck(state: RunView) -> str:
    """Return advice in one sentence, from the idle shares: the bottleneck is the side that never waits."""
    learner, paused = state.idle_learner, state.paused_generators
    if state.status is None or learner is None or len(state.of_start("idle/learner")) < FIRST_STEPS:
        return waiting_for(state) or "no step was made"
    if state.members and all(member.state == "dirty" for member in state.members):
        return waiting_for(state) or ""
    idle = state.idle_generators or 0.0
    if paused is not None and paused > PAUSED:
        return f"generators stand still {paused:.0%} for weight updates: train larger batches"
    if state.status.max_lag == 0 and _free_cores(state) == 0:
        return "sampling and training take turns on all cores (staleness.max_lag is 0)"
    if learner > WAITING and idle > WAITING:
        return f"learner waits {learner:.0%}, generators {idle:.0%}: raise staleness.max_lag or window_groups"
    if learner > WAITING:
        return f"learner waits {learner:.0%} of the time: {_more(state, idle, learner)}"
    if idle > WAITING:
        count = len(state.members)
        needed = _needed(count, idle, learner)
        fewer = f"{needed} of {count} would do, or " if needed < count else ""
        cure = "raise learner.threads" if _free_cores(state) == 0 else "add learner.ranks in a new run"
        return f"generators wait {idle:.0%}: {fewer}{cure}"
    queued = state.history.latest("staleness/in_queue") or 0.0
    lower = min(int(queued), state.status.max_lag - 1)  # at max_lag 0 generators and learner would take turns
    if queued >= QUEUED_STEPS and learner < BUSY and lower > 0:
        return f"rollouts wait {queued:.1f} steps in the queue: lower staleness.max_lag by {lower}"
    return "balanced: neither side waits much"


def _needed(count: int, idle: float, learner: float) -> int:
    """Return the number of generators that would just keep the learner busy."""
    return max(1, math.ceil(count * (1 - idle) / max(1 - learner, 1e-6) - 1e-9))


def _free_cores(state: RunView) -> int | None:
    """Return the cores without a process of the run; None with GPUs, of which each process has its own."""
    if state.status is None or state.status.cores is None:
        return None
    return max(0, state.status.cores - state.status.ranks - len(state.members))


def _more(state: RunView, idle: float, learner: float) -> str:
    count, free = len(state.members), _free_cores(state)
    if not count:
        return "add generators"
    if free == 0:
        return "no core is free; raise generator.threads"
    missing = max(1, _needed(count, idle, learner) - count)
    missing = missing if free is None else min(missing, free)
    if missing > MOST_TIMES * count:
        return f"far too few; begin with {MOST_TIMES * count} more"
    # A run has all GPUs of a host by default, and `asyncrl scale` is refused where none is free.
    how = "on more GPUs or hosts" if free is None else f"asyncrl scale generators=+{missing}"
    return f"add {missing} generator{'s' * (missing > 1)} ({how})"
