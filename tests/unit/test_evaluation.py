"""Rounds of held-out evaluation: which are due, what they say, and that none is lost or counted twice."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.judge import Gate
from asyncrl.buffer.lanes import eval_lane
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.evaluation import Evaluation, Rounds, resume_ledger, standard_error, summarise
from asyncrl.launch.taking import Taking
from asyncrl.lineage import History, Weights
from asyncrl.report.reports import eval_records
from asyncrl.types import Group, Rollout, VersionSpan
from asyncrl.wire.group_frames import decode_group, encode_group
from tests.support.task_config import config_of

N = 3


def test_every_round_has_one_version_and_the_last_weights_are_evaluated():
    for every, steps in [(5, 20), (5, 22), (7, 3), (1, 4)]:
        rounds = Rounds(N, every, steps, "")
        versions = [rounds.version(index) for index in range(rounds.due(steps))]
        assert versions == [v for v in range(steps + 1) if v % every == 0 or v == steps]
        for version in range(steps + 1):
            assert all(rounds.version(index) <= version for index in range(rounds.due(version)))


def test_best_of_powers_of_two_and_of_all_is_told():
    rollout = group_of(1, 0.0).rollouts[0]
    group = replace(
        group_of(1, 0.0),
        rollouts=tuple(replace(rollout, reward=reward) for reward in (0.0, 0.25, 1.0, 0.5, 0.0)),
    )
    metrics = summarise([group], 0).metrics
    assert {name for name in metrics if "best" in name} == {"eval/best@2", "eval/best@4", "eval/best@5"}
    assert metrics["eval/best@5"] == 1.0 > metrics["eval/best@2"] > metrics["eval/reward_mean"]


def test_a_weighted_sum_that_is_1_but_for_rounding_is_solved():
    metrics = summarise([group_of(1, 0.7 + 0.2 + 0.1)], 0).metrics
    assert metrics["eval/accuracy"] == 1.0 > metrics["eval/reward_mean"]


def test_majorities_are_told_if_a_reward_says_what_the_answer_is():
    rollout = group_of(1, 0.0).rollouts[0]
    votes = [("4", 1.0), ("4", 1.0), ("5", 0.0), ("", 0.0), ("6", 0.0), ("4", 1.0)]
    answered = tuple(replace(rollout, answer=answer, reward=reward) for answer, reward in votes)
    metrics = summarise([replace(group_of(1, 0.0), rollouts=answered)], 0).metrics
    assert {name for name in metrics if "maj" in name} == {"eval/maj@4", "eval/maj@6"}
    assert metrics["eval/maj@6"] == 1.0 > metrics["eval/maj@4"] > metrics["eval/accuracy"] == 0.5
    assert metrics["eval/answered_share"] == pytest.approx(5 / 6)
    records = eval_records([replace(group_of(1, 0.0), rollouts=answered)], 0, str)
    assert [(record.answer, record.sample_number) for record in records] == [
        (answer, place) for place, (answer, _) in enumerate(votes, start=1)
    ]
    silent = tuple(replace(one, answer=None) for one in answered)
    mixed = summarise(
        [replace(group_of(1, 0.0), rollouts=silent), replace(group_of(1, 0.0), rollouts=answered)], 0
    ).metrics
    assert mixed["eval/maj@6"] == 0.5 and mixed["eval/answered_share"] == pytest.approx(5 / 12)
    plain = summarise([replace(group_of(1, 0.0), rollouts=silent)], 0).metrics
    assert not any("maj" in name or "answered" in name for name in plain)


@pytest.mark.parametrize("samples", [1, 4])
def test_a_standard_error_is_the_spread_of_the_mean_over_draws_of_prompts(samples):
    """Against 20,000 evaluations whose prompts are drawn from the first one's: each brings all its samples."""
    draw = np.random.default_rng(0)
    easy = draw.random(12)
    rewards = (draw.random((12, samples)) < easy[:, None]).astype(float)
    rollout = group_of(1, 0.0).rollouts[0]
    groups = [
        replace(group_of(1, 0.0), rollouts=tuple(replace(rollout, reward=float(one)) for one in row))
        for row in rewards
    ]
    metrics = summarise(groups, 0).metrics
    drawn = draw.integers(12, size=(20_000, 12))
    # Of the bootstrap's spread, the unbiased one has n / (n - 1).
    expected = dict.fromkeys(("accuracy", "reward_mean"), rewards.mean(1)[drawn].mean(1).std())
    expected[f"pass@{samples}"] = rewards.max(1)[drawn].mean(1).std()
    for name, spread in expected.items():
        assert metrics[f"eval/se/{name}"] == pytest.approx(spread * math.sqrt(12 / 11), rel=0.03)
    assert {name.removeprefix("eval/se/") for name in metrics if "/se/" in name} >= expected.keys()
    two = summarise(groups[:2], 0).metrics
    apart = abs(rewards[0].mean() - rewards[1].mean())
    assert two["eval/se/reward_mean"] == pytest.approx(apart / 2)
    alone = summarise(groups[:1], 0).metrics
    assert not any("/se/" in name for name in alone), "one prompt has no spread"
    dead = Group.dead(9, "timed out", generator_id="g", version=0)
    assert (metrics["eval/prompts"], alone["eval/prompts"]) == (12, 1)
    assert summarise([*groups, dead], 0).metrics == metrics | {"eval/dead_groups": 1}


def test_why_a_prompt_failed_is_in_the_log_and_with_the_samples(caplog):
    reasons = ["exact_match raised KeyError: 'answer'", "timed out"]
    dead = [Group.dead(9 + i, reason, generator_id="g", version=0) for i, reason in enumerate(reasons)]
    result = summarise([group_of(1, 1.0), *dead], 40, "maths")
    assert result.metrics["eval/maths/dead_groups"] == 2 and result.metrics["eval/maths/prompts"] == 1
    (message,) = caplog.messages
    assert "step 40, data.eval maths: 2 of 3 held-out prompts failed" in message and reasons[0] in message
    lost = [record for record in eval_records(result.groups, 40, str) if record.kind == "dropped"]
    assert [record.reason for record in lost] == [f"held-out, {reason}" for reason in reasons]
    caplog.clear()
    summarise([group_of(1, 1.0)], 40)
    assert not caplog.messages


def test_the_error_of_a_share_is_binomial_and_samples_of_one_prompt_are_not_independent():
    solved = [1.0] * 30 + [0.0] * 70
    assert standard_error(solved) == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    rollout = group_of(1, 0.0).rollouts[0]
    twins = [
        replace(group_of(1, 0.0), rollouts=(replace(rollout, reward=one),) * copies)
        for copies in (1, 8)
        for one in solved
    ]
    once, eightfold = (summarise(groups, 0).metrics for groups in (twins[:100], twins[100:]))
    assert once["eval/se/accuracy"] == eightfold["eval/se/accuracy"] == standard_error(solved)


LANE = "eval"


def group_of(ticket_id: int, reward: float, lane: str = LANE) -> Group:
    rollout = Rollout(
        prompt_ids=np.array([1], dtype=np.int32),
        response_ids=np.array([2], dtype=np.int32),
        action_mask=np.array([True]),
        behaviour_logprobs=np.array([-1.0], dtype=np.float32),
        version_spans=(VersionSpan(0, 1),),
        finish_reason="stop",
        reward=reward if ticket_id % N else 0.0,
    )
    return Group(ticket_id=ticket_id, rollouts=(rollout,), generator_id="g", finished_version=0, lane=lane)


def answer(buffer: MemoryBuffer, reward: float) -> list[int]:
    ids = [ticket.id for ticket in buffer.lease("g", 100).tickets]
    for ticket_id in ids:
        buffer.put("g", ticket_id, encode_group(group_of(ticket_id, reward)))
    return ids


GATE = Gate(
    lane=LANE, decode=decode_group, limits=GroupLimits(vocabulary=10, rollouts=1, max_tokens=8, whole=True)
)


def evaluation(buffer: MemoryBuffer) -> Evaluation:
    one = Evaluation(buffer=buffer, ledger=Ledger(), gate=GATE, rounds=Rounds(N, 2, 5, ""))
    one.recover(0)
    return one


def test_a_round_is_reported_once_with_its_version():
    buffer = MemoryBuffer(BufferRules(groups=N))
    one = evaluation(buffer)
    assert one.poll() == []
    assert one.missing == 1
    assert answer(buffer.peer(), 1.0) == [1, 2, 3]
    (result,) = one.poll()
    assert one.missing == 0
    assert (buffer.audit().done, buffer.audit().payload_bytes) == (3, 0), "the store has let go of the round"
    assert (result.version, result.metrics["eval/accuracy"]) == (0, pytest.approx(2 / 3))
    assert one.poll() == []
    one.open(1)
    assert answer(buffer.peer(), 1.0) == []
    one.open(2)
    one.open(5)
    assert one.missing == 3
    assert answer(buffer.peer(), 0.5) == list(range(4, 13))
    assert [(r.version, r.metrics["eval/reward_mean"]) for r in one.poll()] == [
        (v, pytest.approx(1 / 3)) for v in (2, 4, 5)
    ]


def test_the_end_waits_for_rounds_that_are_open_and_for_nothing_else(monkeypatch):
    buffer = MemoryBuffer(BufferRules(groups=N))
    one = evaluation(buffer)
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: answer(buffer.peer(), 1.0))
    monkeypatch.setattr("asyncrl.evaluation.time", clock)
    assert one.wait(0.0) == []
    assert [result.version for result in one.wait(1.0)] == [0]
    clock.sleep = pytest.fail
    assert one.wait(1.0) == []


@pytest.mark.parametrize(
    ("every_s", "complete", "stopped_s"), [(140.0, 1, 0.0), (170.0, 0, 0.0), (80.0, 1, 9000.0)]
)
def test_the_last_round_may_last_while_groups_arrive(monkeypatch, caplog, every_s, complete, stopped_s):
    """The time in which the whole run was suspended, here after 50 s, is no silence."""
    buffer = MemoryBuffer(BufferRules(groups=N, lease_s=1e6))
    one, peer, now = evaluation(buffer), buffer.peer(), SimpleNamespace(s=0.0)
    ids = [ticket.id for ticket in peer.lease("g", N).tickets]

    def sleep(_):
        now.s += 10.0 + stopped_s * (now.s == 50.0)
        if ids and now.s >= (N + 1 - len(ids)) * every_s + stopped_s:
            peer.put("g", ids[0], encode_group(group_of(ids.pop(0), 1.0)))

    clock = SimpleNamespace(monotonic=lambda: now.s, sleep=sleep)
    monkeypatch.setattr("asyncrl.evaluation.time", clock)
    monkeypatch.setattr("asyncrl.hosting.progress.time", clock)
    taking = Taking(Mock(), Mock(), [one], deaths=Mock(), stall_s=150.0)
    assert sum(map(len, taking.last_rounds(0))) == complete
    assert ("1 rounds of evaluation are left out" in caplog.text) == (not complete)
    assert now.s == pytest.approx(N * every_s + stopped_s if complete else 150.0, abs=20.0)


def test_a_wiped_store_only_costs_asking_again():
    buffer = MemoryBuffer(BufferRules(groups=N))
    one = evaluation(buffer)
    answer(buffer.peer(), 1.0)
    one.poll()
    one.open(2)
    answer(buffer.peer(), 1.0)
    buffer._store = MemoryBuffer(BufferRules(groups=N))._store
    assert one.poll() == []
    assert answer(buffer.peer(), 1.0) == [4, 5, 6]
    assert [result.version for result in one.poll()] == [2]


def resumed(buffer: MemoryBuffer, state: dict, version: int, **rules: Any) -> Evaluation:
    rounds = Rounds(N, 2, 5, "")._replace(**rules)
    ledger = resume_ledger(json.loads(json.dumps(state)), rounds, version=version)
    one = Evaluation(buffer=buffer, ledger=ledger, gate=GATE, rounds=rounds)
    one.recover(version)
    return one


def test_a_resumed_run_goes_on_where_the_checkpoint_was():
    buffer = MemoryBuffer(BufferRules(groups=N))
    one = resumed(buffer, {}, 0)
    answer(buffer.peer(), 1.0)
    assert [result.version for result in one.poll()] == [0]
    again = resumed(buffer.peer(), one.state(), 3)
    assert again.poll() == []
    assert answer(buffer.peer(), 1.0) == [4, 5, 6]
    assert [result.version for result in again.poll()] == [2]


@pytest.mark.parametrize(
    ("version", "rules", "expected"),
    [
        (4, {"every": 3}, [5]),  # rounds 0 and 3 are passed; 5 is the last
        (4, {"every": 1}, [4, 5]),
        (4, {"prompts": 2}, [4, 5]),
        (4, {"asked": "more samples"}, [4, 5]),
        (5, {"steps": 9}, [6, 8, 9]),  # round 3 was that of the last version, 5, and is now that of 6
        (5, {"steps": 9, "every": 20}, [9]),
    ],
)
def test_other_rules_begin_with_the_next_round_that_is_not_passed(version, rules, expected):
    buffer = MemoryBuffer(BufferRules(groups=N))
    one = resumed(buffer, {}, 0)
    one.open(5)
    answer(buffer.peer(), 1.0)
    assert [result.version for result in one.poll()] == [0, 2, 4, 5]
    prompts, steps = rules.get("prompts", N), rules.get("steps", 5)
    lane = MemoryBuffer(BufferRules(groups=prompts))
    other = resumed(lane, one.state(), version, **rules)
    found = []
    for now in range(version, steps + 1):
        other.open(now)
        for ticket in lane.peer().lease("g", 100).tickets:
            needed = other.rounds.version(ticket.minimum_version)
            assert version <= needed <= now
            assert (ticket.id - 1) // prompts == ticket.minimum_version
            lane.put("g", ticket.id, encode_group(group_of(ticket.id, 1.0)))
        found += [result.version for result in other.poll()]
    assert found == expected


def test_lanes_of_different_rules_differ():
    names = {Rounds(p, e, s, a).lane for p in (1, 11) for e in (1, 11) for s in (1, 11) for a in ("a1", "1")}
    assert len(names) == 16


def test_a_round_waits_for_all_of_its_prompts_though_the_next_one_is_ahead():
    buffer = MemoryBuffer(BufferRules(groups=N))
    one = resumed(buffer, {}, 0)
    one.open(2)
    tickets = buffer.peer().lease("g", 100).tickets
    assert [ticket.id for ticket in tickets] == [1, 2, 3, 4, 5, 6]
    for ticket_id in (1, 2, 4, 5, 6):
        buffer.put("g", ticket_id, encode_group(group_of(ticket_id, 1.0)))
    assert one.poll() == []
    buffer.put("g", 3, encode_group(group_of(3, 1.0)))
    assert [[group.ticket_id for group in result.groups] for result in one.poll()] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("wrong", [b"not a frame", "another id"])
def test_a_frame_that_is_not_ours_is_sampled_again_and_the_round_stays_whole(wrong):
    buffer = MemoryBuffer(BufferRules(groups=N))
    one = resumed(buffer, {}, 0)
    for ticket in buffer.peer().lease("g", 100).tickets:
        frame = encode_group(group_of(ticket.id if ticket.id != 2 or wrong != "another id" else 7, 1.0))
        buffer.put("g", ticket.id, wrong if ticket.id == 2 and isinstance(wrong, bytes) else frame)
    assert one.poll() == []
    assert one.poll() == []  # the other two are taken, the round is not whole
    before = one.state()
    assert answer(buffer.peer(), 1.0) == [2]
    (result,) = one.poll()
    assert [group.ticket_id for group in result.groups] == [1, 2, 3] and result.version == 0
    assert buffer.audit().missing == 0 and buffer.audit().counters["rejected_frames"] == 1
    assert before["ledger"]["takes"] == 0  # part of a round is in no checkpoint
    again = resumed(buffer.peer(), before, 0)
    assert len(answer(buffer.peer(), 1.0)) in (0, N)
    assert [result.version for result in again.poll()] == [0]


def test_what_lost_weights_answered_is_asked_again_in_one_poll_and_costs_no_attempt():
    buffer = MemoryBuffer(BufferRules(groups=N, max_attempts=1))
    one = resumed(buffer, {}, 0)
    one.history = History(5, (Weights(0, 0),))
    for ticket, weights in zip(buffer.peer().lease("g", N).tickets, [(0, 0), (2, 4), (1, 4)], strict=True):
        group = group_of(ticket.id, 1.0)
        rollout = replace(group.rollouts[0], version_spans=(VersionSpan(weights[0], 1, weights[1]),))
        buffer.put("g", ticket.id, encode_group(replace(group, rollouts=(rollout,))))
    assert one.poll() == []
    assert answer(buffer.peer(), 0.5) == [2, 3]
    (result,) = one.poll()
    assert result.metrics["eval/dead_groups"] == 0 and result.metrics["eval/reward_mean"] == 0.5
    assert buffer.audit().missing == 0 and buffer.audit().counters["rejected_frames"] == 2


def test_the_lane_may_hold_what_the_store_holds():
    config = config_of(store={"max_gib": 9.0})
    assert eval_lane(config, Mock(), LANE, N)._rules.max_bytes == 9 << 30
