"""Rounds of held-out evaluation: which are due, what they say, and that none is lost or counted twice."""

from itertools import combinations

import numpy as np
import pytest

from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.evaluation import Evaluation, pass_at_k, round_version, rounds_due
from asyncrl.types import Group, Rollout, VersionSpan
from asyncrl.wire.schema import decode_group, encode_group

N = 3


def test_every_round_has_one_version_and_the_last_weights_are_evaluated():
    for every, steps in [(5, 20), (5, 22), (7, 3), (1, 4)]:
        rounds = range(rounds_due(steps, every=every, steps=steps))
        versions = [round_version(index, every=every, steps=steps) for index in rounds]
        assert versions == [v for v in range(steps + 1) if v % every == 0 or v == steps]
        for version in range(steps + 1):
            due = rounds_due(version, every=every, steps=steps)
            assert all(round_version(index, every=every, steps=steps) <= version for index in range(due))


def test_pass_at_k_is_the_share_of_draws_with_a_correct_one():
    for samples in range(1, 6):
        for correct in range(samples + 1):
            marks = [True] * correct + [False] * (samples - correct)
            for k in range(1, samples + 1):
                draws = list(combinations(marks, k))
                assert pass_at_k(correct, samples, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def answer(buffer: MemoryBuffer, reward: float) -> list[int]:
    ids = [ticket.id for ticket in buffer.lease("g", 100).tickets]
    for ticket_id in ids:
        rollout = Rollout(
            prompt_ids=np.array([1], dtype=np.int32),
            response_ids=np.array([2], dtype=np.int32),
            action_mask=np.array([True]),
            behaviour_logprobs=np.array([-1.0], dtype=np.float32),
            version_spans=(VersionSpan(0, 1),),
            finish_reason="stop",
            reward=reward if ticket_id % N else 0.0,
        )
        group = Group(ticket_id=ticket_id, rollouts=(rollout,), generator_id="g", finished_version=0)
        buffer.put("g", ticket_id, encode_group(group))
    return ids


def evaluation(buffer: MemoryBuffer) -> Evaluation:
    one = Evaluation(buffer=buffer, ledger=Ledger(), decode=decode_group, prompts=N, every=2, steps=5)
    one.recover(0)
    return one


def test_a_round_is_reported_once_with_its_version():
    buffer = MemoryBuffer(BufferRules(groups=N))
    one = evaluation(buffer)
    assert one.poll() == []
    assert answer(buffer.peer(), 1.0) == [1, 2, 3]
    (result,) = one.poll()
    assert (result.version, result.metrics["eval/accuracy"]) == (0, pytest.approx(2 / 3))
    assert one.poll() == []
    one.open(1)
    assert answer(buffer.peer(), 1.0) == []
    one.open(2)
    one.open(5)
    assert answer(buffer.peer(), 0.5) == list(range(4, 13))
    assert [(r.version, r.metrics["eval/reward_mean"]) for r in one.poll()] == [(v, pytest.approx(1 / 3)) for v in (2, 4, 5)]


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
