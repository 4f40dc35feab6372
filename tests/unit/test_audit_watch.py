import logging

import pytest

from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.judge import Gate
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.buffer.watch import CHECK_EVERY_S, AuditWatch
from asyncrl.evaluation import Evaluation, Rounds, resume_ledger
from asyncrl.wire.group_frames import decode_group
from tests.support.buffer_contract import RULES, fill


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def buffer() -> MemoryBuffer:
    buffer = MemoryBuffer(RULES)
    buffer.recover(Ledger(), version=0, limit=8)
    fill(buffer, 4)
    return buffer


def looks(watch: AuditWatch, clock: Clock, seconds: int) -> list[int]:
    """The mismatch after each second, as the learner asks."""
    found = []
    for _ in range(seconds):
        clock.now_s += 1.0
        watch.audit()
        found.append(watch.mismatch)
    return found


def test_a_mismatch_that_lasts_is_told_once_and_so_is_its_end(
    buffer: MemoryBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    watch = AuditWatch("training", buffer.audit, clock=clock)
    assert looks(watch, clock, 30) == [0] * 30 and not caplog.records
    buffer._store.ready.discard(2)  # broken by hand: the id is nowhere
    found = looks(watch, clock, 40)
    assert found.index(1) < 2 * CHECK_EVERY_S and found[-1] == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert (
        "training: 1 issued ids are nowhere" in caplog.text
        and "issued 4, leased 0, reissue 0, ready 3" in caplog.text
    )
    buffer.recover(Ledger(), version=0, limit=8)
    assert looks(watch, clock, 11)[-1] == 0
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]


def test_an_id_in_two_places_is_told_too(buffer: MemoryBuffer, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = AuditWatch("training", buffer.audit, clock=clock)
    buffer._store.reissue.update((1, 3))
    assert looks(watch, clock, 20)[-1] == -2
    assert "2 issued ids are in two places" in caplog.text


def test_a_mismatch_that_is_gone_at_the_next_judgement_is_none(
    buffer: MemoryBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    watch = AuditWatch("training", buffer.audit, clock=clock)
    buffer._store.ready.discard(2)
    watch.audit()
    buffer.recover(Ledger(), version=0, limit=8)
    assert looks(watch, clock, 30) == [0] * 30 and not caplog.records


def test_a_mismatch_is_healed_at_once_and_then_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    watch = AuditWatch("evaluation", lambda: None, clock=lambda: now_s)
    assert not watch.is_recovery_due()
    watch.mismatch, due_at_s = 1, []
    for second in range(100):
        now_s = float(second)
        if watch.is_recovery_due():
            due_at_s.append(second)
    assert due_at_s == [0, 20, 60]
    assert watch.recoveries == 3
    assert caplog.text.count("evaluation: the learner repairs the store from its ledger") == 3


def test_the_lane_of_evaluation_keeps_the_law_and_is_healed_too() -> None:
    rounds = Rounds(4, 2, 8, "x")
    clock, buffer = Clock(), MemoryBuffer(BufferRules(groups=4))
    evaluation = Evaluation(
        buffer=buffer,
        # Begun under other rules.
        ledger=resume_ledger({"rules": rounds._replace(every=1)._asdict(), "ledger": {}}, rounds, version=5),
        gate=Gate(
            lane="eval",
            decode=decode_group,
            limits=GroupLimits(vocabulary=9, rollouts=1, max_tokens=9, whole=True),
        ),
        rounds=rounds,
    )
    evaluation.recover(6)
    watch = AuditWatch("evaluation", buffer.audit, clock=clock)
    tickets = [ticket.id for ticket in buffer.lease("g", 9).tickets]
    assert tickets == [13, 14, 15, 16] and looks(watch, clock, 30) == [0] * 30
    buffer._store.leases.pop(14)
    assert looks(watch, clock, 30)[-1] == 1 and watch.is_recovery_due()
    evaluation.recover(6)
    assert looks(watch, clock, 30)[-1] == 0
    assert [ticket.id for ticket in buffer.lease("h", 9).tickets] == [14]
