"""Who waits for whom, and what to do about it."""

from asyncrl.telemetry.state import DashboardState

WAITING = 0.3
"""A share of idle time worth a word."""
PAUSED = 0.15


def bottleneck(state: DashboardState) -> str:
    """One sentence from the idle shares: the slow part is the one that never waits."""
    learner, generators, paused = state.latest("idle/learner"), state.idle_generators, state.paused_generators
    if learner is None:
        return "no step yet"
    idle = generators or 0.0
    if paused is not None and paused > PAUSED:
        return f"generators stand still {paused:.0%} for weight updates: train larger batches"
    if learner > WAITING and idle > WAITING:
        return f"learner waits {learner:.0%}, generators {idle:.0%}: raise staleness.max_lag or window_groups"
    if learner > WAITING:
        return f"learner waits {learner:.0%} for groups: add generators or shorten responses"
    if idle > WAITING:
        return f"generators wait {idle:.0%} for the learner: add ranks or drop generators"
    return "balanced: neither side waits much"
