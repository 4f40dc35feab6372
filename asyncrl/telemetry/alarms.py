"""Alarms: metrics of a step that announce a failing run; `docs/metrics.md` has a table of them.

A threshold marks where a person should look, not where training breaks: an alarm does not stop the run. The
log has one line when an alarm begins and one when it ends.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.algo.ranges import EQUAL
from asyncrl.telemetry.text import number

log = logging.getLogger(__name__)

PREFIX = "alarm/"
# Nats per token, for runs that begin with a low entropy. At 0.02, one token in 35 is a fair coin and all
# others are certain: the rollouts of a group are nearly the same.
ENTROPY_NATS = 0.02
# Share of the first entropy. Runs trade entropy for reward, most of it early (arXiv:2505.22617): the last
# tenth gains little, and a run that is stopped here can continue from a checkpoint that still explores.
ENTROPY_SHARE = 0.1
ESS = 0.5
# Of weights/probe_limit: a look before generators reject the weights and stop sampling.
PROBE_SHARE = 0.75
SKIPPED = 3  # optimizer steps skipped within the window: one is a spike, three are a pattern
# Mean length relative to the window's. Reasoning may lengthen it over a run, but not double it in a window.
GROWTH = 2.0
TRUNCATED = 0.5
TOLD_STEPS = 3  # first steps in which a share of truncated responses is said that never was smaller
# A step that moves log-probabilities so far replaces the policy instead of improving it.
MOVED_NATS = 1.0
# The log-probability of chosen answers relative to its first value, mean of `FLAT_STEPS` steps. Both are
# negative: above 1 it falls, as it does where training only makes the rejected answers fall faster.
CHOSEN, CHOSEN_FALL = "preference/chosen_logprob", 1.5
FLAT_STEPS = 5  # steps in a row with no signal: a single small batch may have none by chance
WINDOW = 20  # steps that are remembered
QUIET_STEPS = 5  # steps in a row without cause that end an alarm: a metric at its threshold logs rarely


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Earlier metrics to which an alarm compares the newest."""

    first: Mapping[str, float]  # first value of each metric in this process: a resume starts over
    recent: Sequence[Mapping[str, float]]  # metrics of the steps before, at most `WINDOW`
    probe_limit: float = math.inf  # the newest `weights/probe_limit`

    def in_a_row(self, name: str, value: float) -> list[float]:
        """Return the values of `FLAT_STEPS` steps, of which the newest has `value`; empty if one has none."""
        last = [value, *(row[name] for row in list(self.recent)[-FLAT_STEPS + 1 :] if name in row)]
        return last if len(last) == FLAT_STEPS else []


@dataclass(frozen=True, slots=True)
class _Alarm:
    """One kind of alarm."""

    metric: str
    rings: Callable[[float, Past], bool]  # (value of the metric, not NaN; past) -> whether there is a cause
    cure: str


def _length(value: float, past: Past) -> bool:
    lengths = [row["completions/length_mean"] for row in past.recent if "completions/length_mean" in row]
    return len(lengths) >= WINDOW // 2 and value > GROWTH * sum(lengths) / len(lengths)


def _truncated(value: float, past: Past) -> bool:
    """Find a large share; if it was large in all first steps, only in these: the length may be the task."""
    least = min(row.get("completions/truncated_share", 0.0) for row in (past.first, *past.recent))
    return value > TRUNCATED and (len(past.recent) < TOLD_STEPS or least <= TRUNCATED)


ALARMS: Mapping[str, _Alarm] = {
    "entropy": _Alarm(
        "policy/entropy",
        lambda value, past: value < max(ENTROPY_NATS, ENTROPY_SHARE * past.first["policy/entropy"]),
        "raise clip_high or set algorithm.entropy; resume from an earlier checkpoint",
    ),
    "ess": _Alarm(
        "mismatch/ess", lambda value, past: value < ESS, "lower staleness.max_lag; see weights/probe_max"
    ),
    "moved": _Alarm(
        "weights/moved",
        lambda value, past: value > MOVED_NATS,
        "one step replaced the policy: lower learner.optimizer.lr, by ten times or more",
    ),
    "probe": _Alarm(
        "weights/probe_max",
        lambda value, past: value > PROBE_SHARE * past.probe_limit,
        "generators and learner compute differently: try model.dtype float32, and compare their releases",
    ),
    "skipped": _Alarm(
        "policy/skipped_steps",
        lambda now, past: now + sum(row.get("policy/skipped_steps", 0.0) for row in past.recent) >= SKIPPED,
        "lower learner.optimizer.lr; see policy/grad_norm",
    ),
    "length": _Alarm(
        "completions/length_mean", _length, "the reward may favour length: add shaping; see the samples"
    ),
    "truncated": _Alarm(
        "completions/truncated_share",
        _truncated,
        "raise sampling.max_response_tokens or shape long answers, unless this length is the task",
    ),
    "no_signal": _Alarm(
        "group/zero_variance",
        lambda value, past: min(past.in_a_row("group/zero_variance", value), default=0.0) >= 1.0 - EQUAL,
        "all rewards of a group are equal: use easier or harder prompts, or another reward; see the samples",
    ),
    "chosen": _Alarm(
        CHOSEN,
        # Without enough steps the sum is 0, which no log-probability exceeds.
        lambda now, past: sum(past.in_a_row(CHOSEN, now)) / FLAT_STEPS < CHOSEN_FALL * past.first[CHOSEN],
        "the preferred answers become unlikely, too, or longer (completions/length_mean): raise beta of the "
        "advantage, lower learner.optimizer.lr, or take best_of_n",
    ),
    "untrainable": _Alarm(
        "groups/rejected_untrainable",
        lambda value, past: value > 0,
        "unless these groups are from before a resume, a generator samples invalid ones: `asyncrl samples "
        "--dropped` has the reasons",
    ),
    "deadly": _Alarm(
        "groups/rejected_deadly",
        lambda value, past: value > 0,
        "processes died of these groups: `asyncrl audit` and `asyncrl samples --dropped` name them, the "
        "logs have the deaths",
    ),
    "audit": _Alarm(
        "buffer/audit_mismatch",
        lambda value, past: value != 0,
        "the learner repairs it; another program changed the store, or asyncrl has a bug: keep the run "
        "directory and report it",
    ),
}


def causes(metrics: Mapping[str, float], past: Past) -> dict[str, bool]:
    """Return for each alarm whose metric is present whether it has a cause."""
    values = {name: metrics[alarm.metric] for name, alarm in ALARMS.items() if alarm.metric in metrics}
    return {name: not math.isnan(value) and ALARMS[name].rings(value, past) for name, value in values.items()}


def ringing(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of the active alarms in logged metrics."""
    return [name.removeprefix(PREFIX) for name, value in metrics.items() if name.startswith(PREFIX) and value]


@dataclass(slots=True)
class Alarms:
    """Checks the metrics of each step and remembers which alarms are active."""

    _first: dict[str, float] = field(default_factory=dict)
    _recent: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _quiet_steps: dict[str, int] = field(default_factory=dict)  # steps without cause, for each active alarm

    def watch(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Return `alarm/<name>`, 1 or 0, for each alarm with a metric here; log alarms that begin or end."""
        names = {alarm.metric for alarm in ALARMS.values()}
        if not (watched := {name: value for name, value in metrics.items() if name in names}):
            return {}
        self._first = {name: value for name, value in watched.items() if not math.isnan(value)} | self._first
        limit = metrics.get("weights/probe_limit", math.inf)
        found = causes(watched, Past(first=self._first, recent=self._recent, probe_limit=limit))
        self._recent.append(watched)
        for name, has_cause in found.items():
            alarm, was_active = ALARMS[name], name in self._quiet_steps
            found_value = f"{alarm.metric} is {number(watched[alarm.metric])}"
            if has_cause and not was_active:
                log.warning("step %d: alarm `%s` begins: %s; %s", step, name, found_value, alarm.cure)
            if has_cause or was_active:
                self._quiet_steps[name] = 0 if has_cause else self._quiet_steps[name] + 1
            if self._quiet_steps.get(name) == QUIET_STEPS:
                del self._quiet_steps[name]
                log.warning("step %d: alarm `%s` ends: %s", step, name, found_value)
        return {PREFIX + name: float(name in self._quiet_steps) for name in found}
