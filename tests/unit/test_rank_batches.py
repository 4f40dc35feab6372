"""All ranks of a learner train on the same bytes, whatever becomes of the store in the meantime."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.intake import Collected
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.buffer.shards import ShardedIntake
from asyncrl.errors import WireError
from asyncrl.launch import learner_process as learner
from asyncrl.launch.head import Head
from asyncrl.launch.learner_process import LearnerRun
from asyncrl.launch.same_bytes import DecodedFrames
from asyncrl.types import Group
from asyncrl.wire.group_frames import decode_group, encode_group
from tests.support.fake_learner import FakeTrainer, Meeting
from tests.support.intakes import B, frame, intake

RANKS = 3


def head_on(buffer: MemoryBuffer) -> Head:
    """Rank 0's, with nothing but the intake."""
    head: Any = Head.__new__(Head)
    head._hub, head._evaluation, head._reports, head._collected = mock.Mock(), mock.Mock(), mock.Mock(), None
    head._watch = head._eval_watch = mock.Mock(is_recovery_due=lambda: False)
    head._evaluation.poll.return_value = []
    head._decoded, head._rounds, head._deaths = DecodedFrames(decode_group), 0, mock.Mock()
    one = intake(buffer, lambda group, version: "odd" if group.ticket_id % 5 == 3 else None)
    one.gate = replace(one.gate, decode=head._decoded.decode)
    head._intake = ShardedIntake((one,))
    return head  # type: ignore[no-any-return]


def collect_on_all(head: Any) -> list[Collected]:
    """By rank."""
    meeting = Meeting(RANKS)
    runs: list[Any] = [
        LearnerRun(
            mock.Mock(),
            FakeTrainer(meeting, rank),
            mock.Mock(),
            (),
            mock.Mock(),
            None if rank else head,
            mock.Mock(),
            mock.Mock(),
        )
        for rank in range(RANKS)
    ]
    runs[0]._stop.is_set.return_value = False
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda run: run.collect(0), runs))


def contents(collected: Collected) -> list[bytes]:
    return [encode_group(group) for group in collected.groups]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "wire_key", lambda: b"")
    monkeypatch.setattr(learner, "POLL_S", 0.05)


@pytest.mark.parametrize("loss", ["nothing", "a wipe", "other bytes"])
def test_what_the_store_holds_after_the_take_is_nothing_to_the_other_ranks(loss: str) -> None:
    buffer = MemoryBuffer(BufferRules(groups=B))
    head = head_on(buffer)
    for ticket in buffer.lease("g", 8).tickets:
        buffer.put("g", ticket.id, frame(ticket.id))
    poll = head.poll

    def poll_and_lose(version: int, *, wait_s: float) -> bytes:
        message = poll(version, wait_s=wait_s)
        for ticket_id in list(buffer._store.frames) if message else ():
            if loss == "a wipe":
                del buffer._store.frames[ticket_id]
            elif loss == "other bytes":
                buffer._store.frames[ticket_id] = frame(ticket_id, version=-1)
        return message

    with mock.patch.object(head, "poll", poll_and_lose):
        first, *others = collect_on_all(head)
    assert [group.ticket_id for group in first.groups] == [1, 2, 4, 5], "3 is rejected, and another refills the step"
    assert [contents(other) for other in others] == [contents(first)] * (RANKS - 1)


def test_a_refused_frame_that_names_another_ticket_reaches_no_rank() -> None:
    """It is authentic, and comes with a refill, after the group whose ticket it names."""
    buffer = MemoryBuffer(BufferRules(groups=B, max_attempts=5))
    head = head_on(buffer)
    for ticket in buffer.lease("g", 8).tickets:
        buffer.put("g", ticket.id, frame(1, version=-1) if ticket.id == 5 else frame(ticket.id))
    first, *others = collect_on_all(head)
    assert [(group.ticket_id, group.finished_version) for group in first.groups] == [(1, 0), (2, 0), (4, 0), (6, 0)]
    assert [contents(other) for other in others] == [contents(first)] * (RANKS - 1)


def test_a_frame_that_is_changed_between_ranks_is_noticed_by_its_digest() -> None:
    class Careless(FakeTrainer):
        def broadcast(self, value: bytes | None) -> bytes:
            found: bytes = super().broadcast(value)
            return found if found.isdigit() else found[:-1] + bytes([found[-1] ^ 1])

    head: Any = mock.Mock(frames=[frame(1)], collected=Collected(groups=(), rejected=(), takes=1))
    head.poll.return_value = b"1"
    meeting = Meeting(2)
    runs: list[Any] = [
        LearnerRun(mock.Mock(), Careless(meeting, rank), mock.Mock(), (), mock.Mock(), each, mock.Mock(), mock.Mock())
        for rank, each in enumerate([head, None])
    ]
    runs[0]._stop.is_set.return_value = False
    with ThreadPoolExecutor(2) as pool:
        mine, others = (pool.submit(run.collect, 0) for run in runs)
        assert mine.result().takes == 1
        with pytest.raises(WireError, match="checksum"):
            others.result()


def test_one_rank_keeps_no_frames_of_steps_that_are_over() -> None:
    buffer = MemoryBuffer(BufferRules(groups=B))
    head: Any = head_on(buffer)
    for ticket in buffer.lease("g", 8).tickets:
        buffer.put("g", ticket.id, frame(ticket.id))
    assert head.poll(0, wait_s=0.0) == b"4" and len(head.frames) == 4 and head._decoded._decoded == []
    assert all(isinstance(group, Group) for group in head.collected.groups)
