"""One step's groups: every id is booked once, rejected ones are refilled, and a store that forgets is healed."""

from collections.abc import Callable

import numpy as np
import pytest

from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.intake import Intake
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.errors import RunError
from asyncrl.types import Group, Rollout, VersionSpan
from asyncrl.wire.schema import decode_group, encode_group

B = 4


def frame(ticket_id: int, version: int = 0) -> bytes:
    rollout = Rollout(
        prompt_ids=np.array([1, 2], dtype=np.int32),
        response_ids=np.array([3], dtype=np.int32),
        action_mask=np.array([True]),
        behaviour_logprobs=np.array([-0.5], dtype=np.float32),
        version_spans=(VersionSpan(version, 1),),
        finish_reason="stop",
        reward=float(ticket_id % 2),
    )
    return encode_group(Group(ticket_id=ticket_id, rollouts=(rollout,), generator_id="g", finished_version=version))


def intake(buffer: MemoryBuffer, judge: Callable[[Group, int], str | None] = lambda group, version: None, **more) -> Intake:
    settings = {"groups": B, "window": 2 * B, "max_lag": 1, "max_refills": 3, "stall_s": 60.0} | more
    one = Intake(buffer=buffer, ledger=Ledger(), decode=decode_group, judge=judge, **settings)
    one.recover(0)
    return one


def generate(buffer: MemoryBuffer, count: int) -> list[int]:
    ids = [ticket.id for ticket in buffer.lease("g", count).tickets]
    for ticket_id in ids:
        buffer.put("g", ticket_id, frame(ticket_id))
    return ids


@pytest.fixture
def buffer() -> MemoryBuffer:
    return MemoryBuffer(BufferRules(groups=B))


def ids_of(collected) -> list[int]:
    return [group.ticket_id for group in collected.groups]


def test_nothing_is_handed_out_until_the_step_is_whole(buffer):
    one = intake(buffer)
    assert generate(buffer.peer(), 3) == [1, 2, 3]
    assert one.poll(0, wait_s=0) is None
    assert one.ledger.consumed == 0
    generate(buffer.peer(), 1)
    assert ids_of(one.poll(0, wait_s=0)) == [1, 2, 3, 4]
    assert (one.ledger.trained, one.ledger.consumed) == (4, 4)


def test_a_rejected_group_gives_its_credit_back_and_is_refilled(buffer):
    one = intake(buffer, judge=lambda group, version: "zero_variance" if group.ticket_id in (2, 3) else None)
    generator = buffer.peer()
    assert generate(generator, 100) == list(range(1, 9))  # (L + 1) B and no more
    collected = one.poll(0, wait_s=0)
    assert ids_of(collected) == [1, 4, 5, 6]
    assert [(group.ticket_id, reason) for group, reason in collected.rejected] == [(2, "zero_variance"), (3, "zero_variance")]
    assert collected.takes == 2
    assert generate(generator, 100) == [9, 10]
    assert one.ledger.rejected == {"zero_variance": 2}
    assert one.ledger.consumed == one.ledger.trained + one.ledger.total_rejected


def test_a_dead_ticket_is_counted_and_refilled(buffer):
    one = intake(buffer)
    generator = buffer.peer()
    ids = [ticket.id for ticket in generator.lease("g", 8).tickets]
    tombstone = encode_group(Group.dead(1, "reward timed out", generator_id="g", version=0))
    for _ in range(2):
        assert not generator.fail("g", 1, "reward timed out", tombstone)
        assert [ticket.id for ticket in generator.lease("g", 1).tickets] == [1]
    assert generator.fail("g", 1, "reward timed out", tombstone)
    for ticket_id in ids[1:]:
        generator.put("g", ticket_id, frame(ticket_id))
    assert ids_of(one.poll(0, wait_s=0)) == [2, 3, 4, 5]
    assert one.ledger.rejected == {"dead": 1}


@pytest.mark.parametrize("rubbish", [b"rubbish", frame(3)], ids=["no frame", "another group's frame"])
def test_a_frame_that_is_none_is_issued_again_and_nothing_is_lost(buffer, rubbish):
    one = intake(buffer)
    generator = buffer.peer()
    for ticket in generator.lease("g", B).tickets:
        generator.put("g", ticket.id, rubbish if ticket.id == 2 else frame(ticket.id))
    assert one.poll(0, wait_s=0) is None
    assert [ticket.id for ticket in generator.lease("other", 1).tickets] == [2]
    generator.put("other", 2, frame(2))
    assert sorted(ids_of(one.poll(0, wait_s=0))) == [1, 2, 3, 4]
    assert one.ledger.consumed == 4
    assert buffer.audit().missing == 0


def test_endless_rejection_stops_with_an_explanation(buffer):
    one = intake(buffer, judge=lambda group, version: "zero_variance", max_refills=2)
    with pytest.raises(RunError, match=r"'zero_variance': \d+.*only 0 of 4 accepted"):
        for _ in range(20):
            generate(buffer.peer(), 100)
            one.poll(0, wait_s=0)


def test_a_stall_is_an_error_with_advice(buffer):
    one = intake(buffer, stall_s=0.0)
    with pytest.raises(RunError, match=r"no group arrived.*asyncrl generator"):
        one.poll(0, wait_s=0.01)


def test_a_wiped_store_is_healed_from_the_ledger_without_repeating_a_group(buffer):
    one = intake(buffer)
    generate(buffer.peer(), 8)
    trained = ids_of(one.poll(0, wait_s=0))
    buffer._store = MemoryBuffer(BufferRules(groups=B))._store  # wiped: everything is gone, the epoch too
    one.open(1)
    assert one.poll(1, wait_s=0) is None
    for _ in range(3):
        generate(buffer.peer(), 8)
        if (collected := one.poll(1, wait_s=0)) is not None:
            break
    assert not set(trained) & set(ids_of(collected))
    assert one.ledger.consumed == 8
