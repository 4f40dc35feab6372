"""All ranks of a learner train on the same bytes, whatever becomes of the store in the meantime."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest

from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.intake import Collected
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.errors import UpdatesRefused, WireError
from asyncrl.hosting import progress
from asyncrl.launch import learner_runs, same_bytes
from asyncrl.launch.learner_runs import FollowerRun, LeadRun
from asyncrl.launch.same_bytes import END, STOP
from asyncrl.launch.taking import Taking
from asyncrl.wire.group_frames import encode_group
from tests.support.fake_learner import FakeTrainer, Meeting
from tests.support.intakes import B, frame, intake

RANKS = 3


def taking_from(buffer: MemoryBuffer) -> Taking:
    """Rank 0's end of a lane, without evaluation."""
    one = intake(buffer, lambda group, version: "odd" if group.ticket_id % 5 == 3 else None)
    lane: Any = buffer
    return Taking(lane, one, [], deaths=mock.Mock(), stall_s=1.0)


def lead_run(trainer: Any, taking: Any) -> LeadRun:
    parts: dict[str, Any] = {
        name: mock.Mock() for name in ("logs", "publisher", "hub", "reporting", "saving", "page")
    }
    parts["saving"].judged.why_ended.return_value = ""
    return LeadRun(trainer=trainer, probe=(), stop=threading.Event(), taking=taking, **parts)


def follower_run(trainer: Any) -> FollowerRun:
    parts: dict[str, Any] = {name: mock.Mock() for name in ("logs", "saving")}
    return FollowerRun(trainer=trainer, probe=(), wire_key=b"", **parts)


def collect_on_all(taking: Any) -> list[Collected]:
    """By rank."""
    meeting = Meeting(RANKS)
    runs: list[LeadRun | FollowerRun] = [
        lead_run(FakeTrainer(meeting, 0), taking),
        *(follower_run(FakeTrainer(meeting, rank)) for rank in range(1, RANKS)),
    ]
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda run: run.collect(0), runs))


def contents(collected: Collected) -> list[bytes]:
    return [encode_group(group) for group in collected.groups]


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_runs, "POLL_S", 0.05)


@pytest.mark.parametrize("loss", ["nothing", "a wipe", "other bytes"])
def test_what_the_store_holds_after_the_take_is_nothing_to_the_other_ranks(loss: str) -> None:
    buffer = MemoryBuffer(BufferRules(groups=B))
    taking = taking_from(buffer)
    for ticket in buffer.lease("g", 8).tickets:
        buffer.put("g", ticket.id, frame(ticket.id))
    poll = taking.poll

    def poll_and_lose(version: int, *, wait_s: float) -> Collected | None:
        taken = poll(version, wait_s=wait_s)
        for ticket_id in list(buffer._store.frames) if taken else ():
            if loss == "a wipe":
                del buffer._store.frames[ticket_id]
            elif loss == "other bytes":
                buffer._store.frames[ticket_id] = frame(ticket_id, version=-1)
        return taken

    with mock.patch.object(taking, "poll", poll_and_lose):
        first, *others = collect_on_all(taking)
    assert [group.ticket_id for group in first.groups] == [1, 2, 4, 5], (
        "3 is rejected, and another refills the step"
    )
    assert [contents(other) for other in others] == [contents(first)] * (RANKS - 1)


def test_a_refused_frame_that_names_another_ticket_reaches_no_rank() -> None:
    """It is authentic, and comes with a refill, after the group whose ticket it names."""
    buffer = MemoryBuffer(BufferRules(groups=B, max_attempts=5))
    taking = taking_from(buffer)
    for ticket in buffer.lease("g", 8).tickets:
        buffer.put("g", ticket.id, frame(1, version=-1) if ticket.id == 5 else frame(ticket.id))
    first, *others = collect_on_all(taking)
    assert [(group.ticket_id, group.finished_version) for group in first.groups] == [
        (1, 0),
        (2, 0),
        (4, 0),
        (6, 0),
    ]
    assert [contents(other) for other in others] == [contents(first)] * (RANKS - 1)


def test_a_frame_that_is_changed_between_ranks_is_noticed_by_its_digest() -> None:
    class Careless(FakeTrainer):
        def broadcast(self, value: bytes | None) -> bytes:
            found: bytes = super().broadcast(value)
            return found if found.isdigit() else found[:-1] + bytes([found[-1] ^ 1])

    taking = mock.Mock()
    taking.poll.return_value = Collected(takes=1, frames=[frame(1)])
    meeting = Meeting(2)
    runs: list[LeadRun | FollowerRun] = [
        lead_run(Careless(meeting, 0), taking),
        follower_run(Careless(meeting, 1)),
    ]
    with ThreadPoolExecutor(2) as pool:
        mine, others = (pool.submit(run.collect, 0) for run in runs)
        assert mine.result().takes == 1
        with pytest.raises(WireError, match="checksum"):
            others.result()


def test_the_other_ranks_do_not_count_as_hung_while_rank_0_ends_the_run(monkeypatch: Any) -> None:
    """Their process ends, or waits within NCCL for that of rank 0, whose own end has a limit."""
    board, place = progress.Board(["rank"]), progress._Place()
    place.memory = board._memory
    monkeypatch.setattr(progress, "_own", place)
    ends = [follower_run(mock.Mock()), lead_run(mock.Mock(), mock.Mock(**{"last_rounds.return_value": []}))]
    found = []
    for run in ends:
        run.finish()
        watch = progress.Watch(board.signs, progress.Limits(hang_s=300.0, slow_s=1800.0))
        watch.look(0.0)
        found.append(watch.look(1801.0))
    assert found == [None, "rank made no progress for 1801 s in `end`"]


def test_the_other_ranks_report_that_they_live_while_rank_0_reads_the_answers_of_an_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of long answers take longer than a rank may be silent."""
    beats, prompts, meeting = Counter[int](), 40, Meeting(2)
    for module in (learner_runs, same_bytes):
        monkeypatch.setattr(module, "beat", lambda: beats.update([threading.get_ident()]), raising=False)
    taking = mock.Mock(**{"counters.return_value": {}})
    taking.poll.return_value = Collected(takes=1, frames=[frame(1)])
    lead, follower = lead_run(FakeTrainer(meeting, 0), taking), follower_run(FakeTrainer(meeting, 1))
    monkeypatch.setattr(lead.hub, "counters", dict)

    def evaluation(results: object, alive: Callable[[], object] = lambda: None) -> None:
        for _ in range(prompts):
            alive()

    monkeypatch.setattr(lead.reporting, "evaluation", evaluation)

    def work(run: LeadRun | FollowerRun) -> tuple[int, int]:
        run.collect(0)
        collected = beats[threading.get_ident()]
        run.report(mock.Mock(version=1))
        return collected, beats[threading.get_ident()] - collected

    with ThreadPoolExecutor(2) as pool:
        for counts in pool.map(work, (lead, follower)):
            assert min(counts) >= prompts


def test_a_step_has_the_frame_of_each_of_its_groups() -> None:
    buffer = MemoryBuffer(BufferRules(groups=B))
    taking = taking_from(buffer)
    for ticket in buffer.lease("g", 8).tickets:
        buffer.put("g", ticket.id, frame(ticket.id))
    taken = taking.poll(0, wait_s=0.0)
    assert taken is not None and contents(taken) == list(taken.frames) and len(taken.frames) == 4


@pytest.mark.parametrize("part", ["hub", "publisher"])
def test_the_last_evaluation_waits_for_no_answer_of_weights_that_arrive_nowhere(part: str) -> None:
    run = lead_run(mock.Mock(), mock.Mock(**{"last_rounds.return_value": [[], []]}))
    getattr(run, part).check.side_effect = UpdatesRefused("no generator takes them")
    with pytest.raises(UpdatesRefused):
        run.finish()
    run.reporting.evaluation.assert_called_once_with([])  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", [STOP, END])
def test_whoever_is_asked_to_stop_or_has_learnt_enough_has_every_rank_save_and_leave(end: bytes) -> None:
    class Saved(Exception): ...

    meeting = Meeting(2)
    lead, follower = lead_run(FakeTrainer(meeting, 0), mock.Mock()), follower_run(FakeTrainer(meeting, 1))
    for run in (lead, follower):
        run.saving.save_and_leave.side_effect = Saved  # type: ignore[attr-defined]
    lead.saving.judged.why_ended.return_value = "" if end == STOP else "it is good"  # type: ignore[attr-defined]
    if end == STOP:
        lead.stop.set()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run.collect, 7) for run in (lead, follower)]:
            with pytest.raises(Saved):
                done.result()
    for run in (lead, follower):
        run.saving.save_and_leave.assert_called_once_with(7, end)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (SystemExit(143), ("stopped", "asked to stop")),
        (SystemExit(0), ("failed", "SystemExit: 0")),
        (KeyError("x"), ("failed", "KeyError: 'x'")),
    ],
)
def test_the_page_tells_a_stop_from_code_that_exits(error: BaseException, state: tuple[str, str]) -> None:
    run = lead_run(mock.Mock(), mock.Mock())
    with pytest.raises(type(error)), run:
        raise error
    assert mock.call.enter(*state) in run.page.mock_calls  # type: ignore[attr-defined]
