"""What may be digested: everything that digests groups survives what the judge lets pass, and the judge
refuses the rest."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.advantages import grpo
from asyncrl.algo.trainable import (
    MOST_NATS,
    MOST_REWARD,
    MOST_SEQUENCES,
    MOST_VERSION,
    GroupLimits,
    trainable,
)
from asyncrl.batch.estimate import Estimator
from asyncrl.batch.plan import Planner
from asyncrl.buffer.base import GIVEN_UP, BufferRules, PutOutcome
from asyncrl.buffer.intake import Collected, Intake
from asyncrl.buffer.judge import Gate, make_judge
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.evaluation import Evaluation, Rounds, summarise
from asyncrl.learner import Step
from asyncrl.report.reports import dropped_records, eval_records, sample_records
from asyncrl.report.step_metrics import step_metrics
from asyncrl.report.timeline import Timeline
from asyncrl.stopwatch import Span
from asyncrl.types import Group, GroupTimes, Rollout, Turns, VersionSpan
from asyncrl.wire.group_frames import decode_group, encode_group
from tests.support.fake_learner import SETTINGS, FakeTrainer

LIMITS = GroupLimits(vocabulary=100, rollouts=2, max_tokens=24)
WHOLE = replace(LIMITS, whole=True)
LAST = 2**31 - 1


def rollout(**changes: Any) -> Rollout:
    response = changes.pop("response", [5, 99])
    values: dict[str, Any] = {
        "prompt_ids": np.array(changes.pop("prompt", [0, 7]), dtype=np.int32),
        "response_ids": np.array(response, dtype=np.int32),
        "action_mask": np.ones(len(response), dtype=np.bool_),
        "behaviour_logprobs": np.full(len(response), changes.pop("nats", -1.0), dtype=np.float32),
        "version_spans": (VersionSpan(changes.pop("version", 0), len(response)),) if response else (),
        "finish_reason": "stop",
        "reward": 1.0,
    }
    return Rollout(**values | changes)


def group(*rollouts: Rollout, **changes: Any) -> Group:
    values = {"ticket_id": 1, "rollouts": rollouts or (rollout(), rollout(reward=0.0)), "generator_id": "g"}
    return Group(**values | {"finished_version": 0, "times": GroupTimes(1.0, 2.0, 3.0)} | changes)


def one(**changes: Any) -> Group:
    return group(rollout(**changes), rollout())


def turns(ends: list[int], rewards: list[float] | None = None) -> Turns:
    column = None if rewards is None else np.array(rewards, dtype=np.float32)
    return Turns(ends=np.array(ends, dtype=np.int32), rewards=column)


def episodes(of: list[int], second: Rollout | None = None) -> Group:
    rollouts = [rollout() for _ in of]
    rollouts[1] = second or rollouts[1]
    return group(*rollouts, episode_of=np.array(of, dtype=np.int32))


POISON: dict[str, Group] = {
    "response token beyond the vocabulary": one(response=[5, 100]),
    "response token far beyond": one(response=[LAST]),
    "negative response token": one(response=[-1, 5]),
    "prompt token beyond the vocabulary": one(prompt=[100]),
    "negative prompt token": one(prompt=[-LAST]),
    "empty prompt": one(prompt=[]),
    "empty response": one(response=[]),
    "too long": one(prompt=[1] * 23),
    "no rollouts": replace(group(), rollouts=()),
    "too many rollouts": group(rollout(), rollout(), rollout()),
    "times NaN": group(times=GroupTimes(math.nan, 1.0, 1.0)),
    "times inf": group(times=GroupTimes(1.0, math.inf, 1.0)),
    "times before 1970": group(times=GroupTimes(1.0, -1e308, 1.0)),
    "times far": group(times=GroupTimes(1.0, 1.0, 1e308)),
    "sampling_s NaN": group(sampling_s=math.nan),
    "sampling_s 1e308": group(sampling_s=1e308),
    "sampling_s negative": group(sampling_s=-1.0),
    "reward_s inf": group(reward_s=math.inf),
    "finished_version -2^63": group(finished_version=-(2**63)),
    "finished_version 2^63": group(finished_version=2**63 - 1),
    "negative version": one(version=-1),
    "version 2^62": one(version=2**62),
    "span without tokens": one(version_spans=(VersionSpan(0, 2), VersionSpan(-(2**63), 0))),
    "reward 1e300": one(reward=1e300),
    "reward -1e300": one(reward=-1e300),
    "reward NaN": one(reward=math.nan),
    "reward part 1e300": one(reward_parts={"a": 1e300}),
    "many reward parts": one(reward_parts={str(n): 0.0 for n in range(65)}),
    "long name of a reward part": one(reward_parts={"a" * 201: 0.0}),
    "long answer": one(answer="4" * 201),
    "greedy reward -1e300": group(greedy_reward=-1e300),
    "log-probability far above 0": one(nats=1.0),
    "log-probability far below 0": one(nats=-1e30),
    "log-probability NaN": one(nats=math.nan),
    "log-probability -inf": one(nats=-math.inf),
    "long generator id": group(generator_id="g" * 201),
    "long finish reason": one(finish_reason="s" * 201),
    "too many episodes": episodes([0, 1, 2]),
    "too many rollouts of an episode": episodes([0] * (MOST_SEQUENCES + 1)),
    "rollouts of one episode with two rewards": episodes([0, 0], second=rollout(reward=0.5)),
    "with two endings": episodes([0, 0], second=rollout(finish_reason="time")),
    "turn that ends with no action": one(action_mask=np.array([True, False]), turns=turns([2])),
    "action behind the last turn": one(turns=turns([1])),
    "action of no turn": one(turns=turns([])),
    "turn reward 1e30": one(turns=turns([2], rewards=[1e30])),
    "turn reward NaN": one(turns=turns([2], rewards=[math.nan])),
    "episode metric inf": group(episode_metrics={"a": np.array([0, math.inf], dtype=np.float32)}),
    "episode metric 1e30": group(episode_metrics={"a": np.array([0, 1e30], dtype=np.float32)}),
    "many episode metrics": group(episode_metrics={f"a{n}": np.zeros(2, np.float32) for n in range(65)}),
    "long name of an episode metric": group(episode_metrics={"a" * 201: np.zeros(2, np.float32)}),
    "name of no metric": group(episode_metrics={"a b\n": np.zeros(2, np.float32)}),
    "missing for no reason": group(missing={"": 1}),
    "missing for a reason that names no metric": group(missing={"a b\n": 1}),
    "missing for a long reason": group(missing={"a" * 201: 1}),
    "missing -1": group(missing={"died": -1}),
    "missing 2^62": group(missing={"died": 2**62}),
    "empty name of an episode metric": group(episode_metrics={"": np.zeros(2, np.float32)}),
}


@pytest.mark.parametrize("case", POISON)
def test_the_judge_refuses(case):
    reason = trainable(POISON[case], LIMITS)
    assert reason is not None
    assert len(reason) < 500


@pytest.mark.parametrize("column", ["response_ids", "action_mask", "behaviour_logprobs", "version_spans"])
def test_a_rollout_has_one_entry_for_each_token_in_every_column(column):
    with pytest.raises(ValueError, match="each token needs one"):
        rollout(**{column: getattr(rollout(response=[5, 6, 99]), column)})


def test_the_judge_lets_pass_what_is_at_the_bounds():
    at_bounds = group(
        rollout(prompt=[99], response=[0] * 23, nats=-MOST_NATS, reward=MOST_REWARD, version=MOST_VERSION),
        rollout(nats=0.001, reward=-MOST_REWARD, reward_parts={"a" * 200: MOST_REWARD}, answer="4" * 200),
        sampling_s=1e9, finished_version=MOST_VERSION, greedy_reward=MOST_REWARD, generator_id="g" * 200,
    )  # fmt: skip
    assert trainable(at_bounds, LIMITS) is None
    assert trainable(group(rollout()), LIMITS) is None
    assert "exactly 2" in str(trainable(group(rollout()), WHOLE))
    short = group(rollout(), missing={"died": 1})
    assert trainable(short, LIMITS) is None and "exactly 2" in str(trainable(short, WHOLE))


def test_episodes_are_counted_and_not_their_rollouts():
    wide = episodes([0] * MOST_SEQUENCES + [1] * MOST_SEQUENCES)
    assert trainable(wide, WHOLE) is None
    assert "1 episodes, exactly 2" in str(trainable(episodes([0, 0]), WHOLE))
    played = one(
        response=[5, 6, 7, 8],
        action_mask=np.array([True, False, True, False]),
        turns=turns([1, 3], rewards=[0.5, -MOST_REWARD]),
    )
    metrics = {"tools/calls_2.x-y": np.array([math.nan, MOST_REWARD], dtype=np.float32)}
    assert trainable(replace(played, episode_metrics=metrics), WHOLE) is None
    context = rollout(action_mask=np.zeros(2, np.bool_), turns=turns([]))
    assert trainable(group(context, rollout()), WHOLE) is None


def digest(
    directory: Path, groups: tuple[Group, ...], rejected: tuple[tuple[Group, str], ...]
) -> dict[str, float]:
    """Everything that the learner makes of the groups of a step; its numbers."""
    estimator = Estimator(advantage=grpo, max_response_tokens=8, parts=("a",))
    planner = Planner(
        estimator=estimator, columns=frozenset({"logprobs_T"}), proximal=True, settings=SETTINGS
    )
    trainer = FakeTrainer()
    sequences = planner.assemble(groups, 3)
    plan = planner.plan(groups, sequences, planner.measure(trainer, sequences), 0.0)
    result = trainer.step(plan.minibatches[0].microbatches, None)
    taken_at = {one.ticket_id: 5.0 for one in (*groups, *(one for one, _ in rejected))}
    collected = Collected(groups=[*groups], rejected=[*rejected], takes=1, taken_at=taken_at)
    step = Step(
        version=4, collected=collected, plan=plan, results=(result,), seconds={"train": 1.0}, spans=(Span("train", 6.0, 1.0),)
    )  # fmt: skip
    trace = Timeline(directory / "trace.json")
    trace.step(step)
    trace.close()
    table = torch.zeros(LIMITS.vocabulary)
    read = lambda ids: str(table[torch.tensor(list(ids))].shape)  # noqa: E731 - a tokenizer that refuses unknown ids
    sample_records(step, read, 9)
    dropped_records(step, read, 9)
    eval_records([*groups, *(one for one, _ in rejected)], 4, read)
    metrics = step_metrics(step)
    assert {name for name in metrics if name.startswith("reward/") and name.count("/") > 1} <= {
        "reward/a/mean"
    }
    return metrics


floats = st.floats() | st.sampled_from([0.0, 1.0, -1.0, 1e-300, MOST_REWARD, -MOST_REWARD, 1e308])
ints = st.sampled_from([0, 1, 3, 99, 100, -1, LAST, -LAST]) | st.integers(0, 99)
wide = st.sampled_from([0, 1, 3, MOST_VERSION, 2**62, -1, -(2**63)]) | st.integers(0, 5)


@st.composite
def rollouts(draw: Callable[..., Any]) -> Rollout:
    response = draw(st.lists(ints, max_size=6))
    cuts = draw(st.integers(0, len(response)))
    return Rollout(
        prompt_ids=np.array(draw(st.lists(ints, max_size=20)), dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32),
        action_mask=np.array(
            draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response))), dtype=np.bool_
        ),
        behaviour_logprobs=np.full(
            len(response), draw(st.sampled_from([-1.0, 0.0, 5.0, -1e4, -1e38])), dtype=np.float32
        ),
        version_spans=(VersionSpan(draw(wide), cuts), VersionSpan(draw(wide), len(response) - cuts)),
        finish_reason=draw(st.sampled_from(["stop", "length", ""])),
        reward=draw(floats),
        reward_parts=draw(st.dictionaries(st.sampled_from(["a", "b", "/1", "\n"]), floats, max_size=2)),
        answer=draw(st.none() | st.sampled_from(["", "4", "\x1b[2J", "4" * 201])),
    )


@st.composite
def any_groups(draw: Callable[..., Any]) -> Group:
    return Group(
        ticket_id=1, rollouts=tuple(draw(st.lists(rollouts(), max_size=3))), generator_id="g", finished_version=draw(wide),
        sampling_s=draw(floats), reward_s=draw(floats), times=draw(st.none() | st.builds(GroupTimes, floats, floats, floats)),
        greedy_reward=draw(st.none() | floats),
    )  # fmt: skip


def mended(group: Group) -> Group:
    """Most random groups are refused for one of many reasons; these are refused for one of few."""
    fitting = [r for r in group.rollouts if trainable(replace(base, rollouts=(r,)), LIMITS) is None]
    return replace(group, rollouts=tuple(fitting)[:2])


base = Group(ticket_id=1, rollouts=(), generator_id="g", finished_version=0)


@given(drawn=any_groups())
def test_whatever_passes_is_digested(drawn, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp()
    for candidate in (drawn, mended(drawn), replace(base, rollouts=mended(drawn).rollouts)):
        if trainable(candidate, LIMITS) is None:
            metrics = digest(directory, (replace(candidate, ticket_id=2), candidate), ())
            assert np.isfinite(list(metrics.values())).all()
        if trainable(candidate, WHOLE) is None:
            assert np.isfinite(list(summarise([candidate], 0).metrics.values())).all()


def gate(lane: str = "train", limits: GroupLimits = LIMITS) -> Gate:
    return Gate(lane=lane, decode=decode_group, limits=limits)


def intake(buffer: MemoryBuffer, **more: Any) -> Intake:
    options = {
        "groups": 2,
        "window": 8,
        "max_lag": 3,
        "max_refills": 1,
        "stall_s": 60.0,
        "gate": gate(),
    } | more
    found = Intake(buffer=buffer, ledger=Ledger(), judge=make_judge([], drop_older_than=None), **options)
    found.recover(0)
    return found


def offered(case: str, **changes: Any) -> bytes:
    """The frame of a hostile generator that holds the key."""
    return encode_group(replace(POISON[case], **changes))


ENCODABLE = [
    case
    for case in POISON
    if not any(word in case for word in ("log-probability NaN", "-inf", "reward NaN", "metric inf"))
]


@pytest.mark.parametrize("case", ENCODABLE)
def test_one_poisoned_group_costs_itself_whatever_it_holds(case, tmp_path):
    buffer = MemoryBuffer(BufferRules(groups=2))
    learner, generator = intake(buffer), buffer.peer()
    for ticket in generator.lease("g", 5).tickets:
        good = encode_group(group(ticket_id=ticket.id))
        frame = offered(case, ticket_id=ticket.id) if ticket.id == 1 else good
        assert generator.put("g", ticket.id, frame) is PutOutcome.STORED
    collected = learner.poll(0, wait_s=0)
    assert collected is not None
    assert [one.ticket_id for one in collected.groups] == [2, 3]
    ((lost, reason),) = collected.rejected
    assert (lost.ticket_id, lost.rollouts, reason.split(": ")[0]) == (1, (), "untrainable")
    assert learner.ledger.rejected == {"untrainable": 1}
    assert (learner.ledger.consumed, buffer.audit().missing) == (3, 0)
    assert digest(tmp_path, collected.groups, collected.rejected)["groups/rejected_untrainable"] == 1
    again = intake(buffer.peer())  # a learner that has no checkpoint: the same takes again, with the same end
    repeated = again.poll(0, wait_s=0)
    assert repeated is not None
    assert [reason for _, reason in repeated.rejected] == [reason]
    assert again.ledger.to_dict() == learner.ledger.to_dict()


@pytest.mark.parametrize("case", ENCODABLE)
def test_one_poisoned_held_out_group_is_a_dead_one_of_its_round(case):
    buffer = MemoryBuffer(BufferRules(groups=3))
    evaluation = Evaluation(
        buffer=buffer, ledger=Ledger(), gate=gate("eval", WHOLE), rounds=Rounds(3, 1, 1, "")
    )
    evaluation.recover(0)
    for ticket in buffer.lease("g", 3).tickets:
        good = encode_group(group(ticket_id=ticket.id, lane="eval"))
        buffer.put("g", ticket.id, offered(case, ticket_id=2, lane="eval") if ticket.id == 2 else good)
    (result,) = evaluation.poll()
    assert result.metrics["eval/dead_groups"] == 1
    assert (result.metrics["eval/reward_mean"], result.metrics["eval/pass@2"]) == (0.5, 1.0)
    reasons = [record.reason for record in eval_records(result.groups, 0, str) if record.kind == "dropped"]
    assert [reason.split(": ")[0] for reason in reasons] == ["held-out, untrainable"]


def test_groups_of_settings_before_are_passed_over_however_many_there_are():
    buffer = MemoryBuffer(BufferRules(groups=2))
    intake(buffer, gate=gate(limits=replace(LIMITS, max_tokens=99)), max_lag=20)
    for ticket in buffer.lease("g", 42).tickets:
        long = [1] * (90 if ticket.id <= 40 else 1)
        buffer.put("g", ticket.id, encode_group(group(rollout(prompt=long), ticket_id=ticket.id)))
    resumed = intake(buffer.peer(), max_lag=20)
    collected = resumed.poll(0, wait_s=0)
    assert collected is not None
    assert [one.ticket_id for one in collected.groups] == [41, 42]
    assert resumed.ledger.rejected == {"untrainable": 40}


def test_a_frame_of_another_lane_is_none_of_this_one():
    buffer = MemoryBuffer(BufferRules(groups=2))
    learner = intake(buffer)
    for ticket in buffer.lease("g", 2).tickets:
        buffer.put(
            "g",
            ticket.id,
            encode_group(group(ticket_id=ticket.id, lane="eval" if ticket.id == 1 else "train")),
        )
    assert learner.poll(0, wait_s=0) is None
    (ticket,) = buffer.lease("g", 1).tickets
    assert ticket.id == 1, "it is sampled again"
    buffer.put("g", 1, encode_group(group(ticket_id=1)))
    assert learner.poll(0, wait_s=0) is not None


def test_a_filter_that_fails_costs_its_groups_and_ends_a_run_that_gets_no_other():
    buffer = MemoryBuffer(BufferRules(groups=2))

    def filter_of_a_user(outcome: object) -> str | None:
        raise ZeroDivisionError("mean of nothing")

    learner = intake(buffer)
    learner.judge = make_judge([filter_of_a_user], drop_older_than=None)
    for ticket in buffer.lease("g", 8).tickets:
        buffer.put("g", ticket.id, encode_group(group(ticket_id=ticket.id)))
    with pytest.raises(Exception, match="filter_failed: ZeroDivisionError: mean of nothing"):
        learner.poll(0, wait_s=0)


def test_a_tombstone_that_carries_more_is_a_tombstone():
    buffer = MemoryBuffer(BufferRules(groups=2))
    learner = intake(buffer)
    for ticket in buffer.lease("g", 3).tickets:
        worse = group(
            ticket_id=1,
            dead_reason="reward failed",
            times=GroupTimes(math.nan, 0.0, 0.0),
            generator_id="g" * 999,
        )
        buffer.put("g", ticket.id, encode_group(worse if ticket.id == 1 else group(ticket_id=ticket.id)))
    collected = learner.poll(0, wait_s=0)
    assert collected is not None
    ((dead, reason),) = collected.rejected
    assert (dead.rollouts, dead.times, len(dead.generator_id), reason) == (
        (),
        None,
        200,
        "dead: reward failed",
    )


def test_what_was_given_up_says_why():
    buffer = MemoryBuffer(BufferRules(groups=2))
    learner = intake(buffer)
    for ticket in buffer.lease("g", 3).tickets:
        buffer.put(
            "g",
            ticket.id,
            GIVEN_UP + b"deadly: \xff" if ticket.id == 1 else encode_group(group(ticket_id=ticket.id)),
        )
    collected = learner.poll(0, wait_s=0)
    assert collected is not None
    assert [reason for _, reason in collected.rejected] == ["deadly: �"]


def test_a_frame_that_says_it_was_given_up_makes_no_name_of_its_own():
    buffer = MemoryBuffer(BufferRules(groups=2))
    learner = intake(buffer)
    for ticket in buffer.lease("g", 4).tickets:
        forged = GIVEN_UP + f"name {ticket.id}: of my own".encode() + b"x" * 10_000
        buffer.put("g", ticket.id, forged if ticket.id < 3 else encode_group(group(ticket_id=ticket.id)))
    collected = learner.poll(0, wait_s=0)
    assert collected is not None
    assert [reason[:23] for _, reason in collected.rejected] == [
        f"dead: name {n}: of my own"[:23] for n in (1, 2)
    ]
    assert max(len(reason) for _, reason in collected.rejected) < 5_000
    assert learner.ledger.rejected == {"dead": 2}
