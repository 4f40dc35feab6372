"""Rollouts of a step for people to read: some that were trained, some that were not and why, some of an
evaluation."""

import math
from collections.abc import Callable, Sequence

from asyncrl.buffer.base import kind_of
from asyncrl.learner import Step
from asyncrl.telemetry.base import SampleRecord
from asyncrl.types import Group, Rollout

Decode = Callable[[Sequence[int]], str]


def sample_records(step: Step, decode: Decode, count: int) -> list[SampleRecord]:
    """`count` rollouts of the step, spread over its groups: the best and the worst of each."""
    records: list[SampleRecord] = []
    advantages = iter(step.plan.sequences)
    for group in step.collected.groups:
        owned = [next(advantages) for _ in group.rollouts]
        ranked = sorted(zip(group.rollouts, owned, strict=True), key=lambda pair: -pair[0].reward)
        for rollout, sequence in (ranked[0], ranked[-1]):
            if len(records) == count:
                return records
            actions = sequence.advantages[rollout.action_mask]
            advantage = float(actions[0]) if actions.size else 0.0
            records.append(_record(group, rollout, step.version, decode, advantage=advantage, kind="train"))
    return records


def dropped_records(step: Step, decode: Decode, count: int) -> list[SampleRecord]:
    """One record for each of at most `count` groups that were taken and not trained, with the best rollout of
    the group.

    Each reason comes once before any reason comes twice. A dead group has no rollouts; its record has the
    reason alone.
    """
    by_reason: dict[str, list[tuple[Group, str]]] = {}
    for group, reason in step.collected.rejected:
        by_reason.setdefault(kind_of(reason), []).append((group, reason))
    # One of each reason, then the second of each, and so on: the most frequent reason must not hide the
    # others.
    turns = sorted(
        ((turn, group, reason) for found in by_reason.values() for turn, (group, reason) in enumerate(found)),
        key=lambda item: item[0],
    )
    return [_dropped(group, reason, step.version, decode) for _, group, reason in turns[:count]]


def _dropped(group: Group, reason: str, step: int, decode: Decode) -> SampleRecord:
    if not group.rollouts:
        return SampleRecord(
            step=step,
            ticket_id=group.ticket_id,
            prompt="",
            response="",
            reward=math.nan,
            parts={},
            advantage=math.nan,
            versions=(),
            finish_reason="",
            generator_id=group.generator_id,
            kind="dropped",
            reason=reason,
        )
    best = max(group.rollouts, key=lambda rollout: rollout.reward)
    return _record(group, best, step, decode, advantage=math.nan, kind="dropped", reason=reason)


def eval_records(groups: Sequence[Group], version: int, decode: Decode, count: int) -> list[SampleRecord]:
    """The first rollout of `count` evaluated prompts, after at most as many that could not be evaluated, with
    the reason."""
    scored = [group for group in groups if group.rollouts][:count]
    lost = [(group, f"held-out, {group.dead_reason}") for group in groups if group.dead_reason is not None][
        :count
    ]
    return [_dropped(group, reason, version, decode) for group, reason in lost] + [
        _record(group, group.rollouts[0], version, decode, advantage=0.0, kind="eval") for group in scored
    ]


def _record(
    group: Group,
    rollout: Rollout,
    step: int,
    decode: Decode,
    *,
    advantage: float,
    kind: str,
    reason: str = "",
) -> SampleRecord:
    return SampleRecord(
        step=step,
        ticket_id=group.ticket_id,
        prompt=decode(rollout.prompt_ids.tolist()),
        response=decode(rollout.response_ids.tolist()),
        reward=rollout.reward,
        parts=dict(rollout.reward_parts),
        advantage=advantage,
        versions=[(span.version, span.tokens) for span in rollout.version_spans],
        finish_reason=rollout.finish_reason,
        generator_id=group.generator_id,
        kind=kind,
        reason=reason,
        answer=rollout.answer or "",
    )
