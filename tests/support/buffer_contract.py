"""What every buffer must do. A subclass provides the fixture `lane`; see `Lane`.

Each test ends with an audit: every issued id is in exactly one place.
"""

from typing import Protocol

import pytest

from asyncrl.buffer.base import DEAD_LETTERS, GIVEN_UP, Buffer, BufferRules, PutOutcome, Take
from asyncrl.buffer.ledger import Ledger, next_chain
from asyncrl.errors import BufferFenced, BufferGap
from asyncrl.lineage import INITIAL, History, Weights

RULES = BufferRules(groups=4, lease_s=1000.0, max_attempts=2, max_bytes=1000)
FRAME = b"frame-%d"


class Lane(Protocol):
    """One empty lane under RULES."""

    def handle(self) -> Buffer:
        """A new process's handle."""
        ...

    def expire(self) -> None:
        """Let more than the lease time pass."""
        ...

    def wipe(self) -> None:
        """The store loses everything."""
        ...


def ids(lease):
    return [ticket.id for ticket in lease.tickets]


def fill(buffer, count, holder="g"):
    """Lease and store `count` groups."""
    leased = ids(buffer.lease(holder, count))
    for ticket_id in leased:
        assert buffer.put(holder, ticket_id, FRAME % ticket_id) is PutOutcome.STORED
    return leased


def take(buffer, ledger, count, window=1):
    """Take and enter into the ledger."""
    taken = buffer.take(ledger, count, window=window)
    assert taken is not None
    ledger.consume(taken.ids)
    assert ledger.chain == taken.chain, "store and ledger compute the same chain"
    return taken


def places(buffer):
    audit = buffer.audit()
    assert audit.missing == 0
    return {name: getattr(audit, name) for name in ("issued", "leased", "reissue", "ready", "taken", "done")}


class BufferContract:
    @pytest.fixture
    def ledger(self):
        return Ledger()

    @pytest.fixture
    def buffer(self, lane, ledger):
        """A recovered learner at version 0 with 8 ids of credit; also used as the generators' side."""
        buffer = lane.handle()
        buffer.recover(ledger, version=0, limit=8)
        yield buffer
        assert lane.handle().audit().missing == 0

    # -- leases

    def test_nothing_is_leased_before_a_learner_came(self, lane):
        lease = lane.handle().lease("g", 5)
        assert (lease.tickets, lease.closed) == ((), False)

    def test_leases_are_dense_and_stop_at_the_credit_limit(self, buffer):
        assert ids(buffer.lease("a", 5)) == [1, 2, 3, 4, 5]
        assert ids(buffer.lease("b", 5)) == [6, 7, 8]
        assert ids(buffer.lease("a", 5)) == []
        assert places(buffer)["leased"] == 8

    def test_tickets_carry_the_oldest_weights_that_may_start_them(self, buffer):
        buffer.set_version(3, limit=12)  # so ids 9..12 are the newest: they are trained at 3 + 0
        lease = buffer.lease("g", 12)
        assert [ticket.minimum_version for ticket in lease.tickets] == [1] * 4 + [2] * 4 + [3] * 4

    def test_tickets_carry_the_history_of_the_learner_that_recovered_last(self, lane, buffer, ledger):
        before, after = History(7, (Weights(0),)), History(9, (Weights(0), Weights(3, 7)))
        assert {ticket.history for ticket in buffer.lease("g", 2).tickets} == {INITIAL}
        for history in (before, after):
            lane.handle().recover(ledger, version=3, limit=20, history=history)
            buffer.revoke("g")
            assert [ticket.history for ticket in buffer.lease("g", 9).tickets] == [history] * 9

    def test_an_expired_lease_is_issued_again_lowest_first(self, lane, buffer):
        buffer.lease("a", 3)
        buffer.put("a", 2, b"x")
        lane.expire()
        assert ids(buffer.lease("b", 3)) == [1, 3, 4]
        assert buffer.audit().counters["lease_expired"] == 2

    def test_a_renewed_lease_lives_and_only_its_holder_renews(self, lane, buffer):
        buffer.lease("a", 2)
        buffer.lease("b", 1)
        lane.expire()
        buffer.renew("a", [1, 3, 77])
        assert ids(buffer.lease("c", 9)) == [2, 3, 4, 5, 6, 7, 8]

    def test_a_late_group_counts_while_nobody_else_was_first(self, lane, buffer):
        buffer.lease("a", 1)
        lane.expire()
        buffer.lease("b", 1)
        assert buffer.put("a", 1, b"late") is PutOutcome.STORED
        assert buffer.put("b", 1, b"later") is PutOutcome.DUPLICATE
        assert places(buffer) == {"issued": 1, "leased": 0, "reissue": 0, "ready": 1, "taken": 0, "done": 0}

    def test_a_late_group_counts_while_its_ticket_waits_to_be_issued_again(self, buffer, ledger):
        buffer.lease("a", 2)
        buffer.give_back("a", [1])
        assert buffer.put("a", 1, b"late") is PutOutcome.STORED
        assert places(buffer) == {"issued": 2, "leased": 1, "reissue": 0, "ready": 1, "taken": 0, "done": 0}
        assert buffer.frames(take(buffer, ledger, 1).ids) == [b"late"]

    def test_given_back_and_revoked_tickets_are_issued_again_at_once(self, buffer):
        buffer.lease("a", 3)
        buffer.lease("b", 3)
        buffer.give_back("a", [2, 5, 99])
        assert buffer.revoke("b") == 3
        assert buffer.revoke("b") == 0
        assert ids(buffer.lease("c", 9)) == [2, 4, 5, 6, 7, 8]
        assert buffer.audit().counters["returned"] == 4

    def test_a_closed_lane_leases_nothing_and_a_recovery_opens_it(self, lane, buffer, ledger):
        buffer.lease("a", 1)
        buffer.give_back("a", [1])
        buffer.close()
        lease = lane.handle().lease("a", 3)
        assert (lease.tickets, lease.closed) == ((), True)
        buffer.recover(ledger, version=0, limit=8)
        lease = buffer.lease("a", 1)
        assert (ids(lease), lease.closed) == ([1], False)

    def test_a_holder_that_dies_costs_its_tickets_and_giving_back_does_not(self, lane, buffer):
        buffer.lease("a", 2)
        buffer.give_back("a", [2])
        assert buffer.revoke("a") == 1
        buffer.lease("b", 1)
        lane.expire()
        assert ids(buffer.lease("c", 2)) == [1, 2]
        assert buffer.audit().counters["deaths"] == 2

    def test_a_ticket_that_kills_its_holders_is_given_up_and_its_neighbours_are_not(self, buffer, ledger):
        """Ticket 2 kills whoever has it; 1 and 3 were near. RULES allow five deaths, two of them alone."""
        held_with_2 = []
        for life in range(20):
            holder = f"g{life}"
            while leased := ids(buffer.lease(holder, 3)):
                if 2 in leased:
                    held_with_2.append(leased)
                    assert ids(buffer.lease(holder, 3)) == [] or leased != [2], "nothing beside a suspect"
                    buffer.revoke(holder)
                    break
                for ticket_id in leased:
                    assert buffer.put(holder, ticket_id, FRAME % ticket_id) is PutOutcome.STORED
            buffer.take(ledger, 99, window=1)
            if places(buffer)["ready"] == 8:
                break
        assert held_with_2 == [[1, 2, 3]] * 3 + [[2]] * 2
        taken = take(buffer, ledger, 3)
        assert buffer.frames(taken.ids)[::2] == [FRAME % 1, FRAME % 3]
        reason = buffer.frames(taken.ids)[1].removeprefix(GIVEN_UP).decode()
        assert reason.startswith("deadly: 5 generators died")
        assert [(letter.id, letter.reason) for letter in buffer.dead_letters()] == [(2, reason)]
        counters = buffer.audit().counters
        assert (counters["dead"], counters.get("failed", 0)) == (1, 0)
        assert buffer.reject_frame(taken, 2, buffer.frames([2])[0], "again", final=True) == taken
        buffer.recover(Ledger(), version=0, limit=8)
        assert buffer.take(Ledger(), 3, window=1) == taken
        assert buffer.commit(1, taken.chain) == 3

    def test_a_suspect_waits_for_a_holder_that_has_nothing(self, buffer):
        buffer.lease("busy", 1)
        for life in range(3):
            assert ids(buffer.lease(f"g{life}", 1)) == [2]
            buffer.revoke(f"g{life}")
        assert ids(buffer.lease("busy", 4)) == [], "first it hands over what it has"
        buffer.put("busy", 1, b"x")
        assert ids(buffer.lease("busy", 4)) == [2]
        assert ids(buffer.lease("busy", 4)) == []
        assert ids(buffer.lease("other", 2)) == [3, 4], "others go on"
        buffer.put("busy", 2, b"x")
        assert ids(buffer.lease("busy", 1)) == [5]

    def test_success_forgets_deaths(self, buffer, ledger):
        for life in range(4):
            buffer.lease(f"g{life}", 1)
            buffer.revoke(f"g{life}")
        buffer.lease("g", 1)
        buffer.put("g", 1, b"rubbish")
        taken = buffer.take(ledger, 1, window=1)
        ledger.consume(buffer.reject_frame(taken, 1, b"rubbish", "no frame of ours").ids)
        for life in range(3):
            assert ids(buffer.lease(f"h{life}", 1)) == [1]
            buffer.revoke(f"h{life}")
        assert places(buffer)["reissue"] == 1

    def test_dead_letters_are_kept_in_order_and_bounded(self, buffer, ledger):
        buffer.set_version(0, limit=DEAD_LETTERS + 8)
        fill(buffer, DEAD_LETTERS + 3)
        taken = take(buffer, ledger, DEAD_LETTERS + 3)
        for ticket_id in taken.ids:
            buffer.reject_frame(taken, ticket_id, FRAME % ticket_id, f"untrainable: {ticket_id}", final=True)
        letters = [(letter.id, letter.reason) for letter in buffer.dead_letters()]
        assert letters == [(i, f"untrainable: {i}") for i in range(DEAD_LETTERS + 3, 3, -1)]

    # -- groups

    def test_a_group_is_stored_once_at_every_stage_of_its_life(self, buffer, ledger):
        fill(buffer, 1)
        assert buffer.put("g", 1, b"again") is PutOutcome.DUPLICATE
        taken = take(buffer, ledger, 1)
        assert buffer.frames(taken.ids) == [FRAME % 1]
        assert buffer.put("g", 1, b"again") is PutOutcome.DUPLICATE
        buffer.commit(taken.number, taken.chain)
        assert buffer.put("g", 1, b"again") is PutOutcome.DUPLICATE
        audit = buffer.audit()
        assert (audit.counters["put"], audit.counters["duplicate"], audit.payload_bytes) == (1, 3, 0)

    def test_an_id_that_was_never_issued_is_not_stored(self, buffer):
        assert buffer.put("g", 5, b"x") is PutOutcome.UNKNOWN
        assert places(buffer)["issued"] == 0

    def test_over_the_cap_nothing_is_dropped_and_only_the_awaited_group_gets_in(self, buffer, ledger):
        buffer.lease("g", 8)
        assert buffer.put("g", 3, bytes(600)) is PutOutcome.STORED
        assert buffer.put("g", 1, bytes(600)) is PutOutcome.FULL
        assert places(buffer)["leased"] == 7, "the generator keeps it"
        assert buffer.take(ledger, 2, window=1) is None
        assert buffer.put("g", 2, bytes(600)) is PutOutcome.FULL
        assert buffer.put("g", 1, bytes(600)) is PutOutcome.STORED, "else the learner would wait for ever"
        assert buffer.put("g", 4, bytes(1)) is PutOutcome.FULL
        assert buffer.put("g", 2, bytes(600)) is PutOutcome.STORED
        taken = take(buffer, ledger, 2)
        assert taken.ids == (1, 2)
        buffer.commit(1, taken.chain)
        assert buffer.audit().payload_bytes == 600
        assert buffer.put("g", 4, bytes(400)) is PutOutcome.STORED, "exactly the cap"
        assert buffer.audit().counters["full"] == 3

    def test_over_the_cap_the_oldest_gets_in_while_the_learner_waits_for_another_buffer(self, buffer, ledger):
        buffer.lease("g", 8)
        assert buffer.put("g", 1, bytes(1000)) is PutOutcome.STORED
        taken = take(buffer, ledger, 1)
        assert buffer.put("g", 2, bytes(10)) is PutOutcome.FULL
        buffer.set_version(0, limit=8)
        assert buffer.put("g", 2, bytes(10)) is PutOutcome.FULL
        buffer.set_version(0, limit=8, waiting=True)
        buffer.set_version(0, limit=8)
        assert buffer.put("g", 3, bytes(10)) is PutOutcome.FULL
        assert buffer.put("g", 2, bytes(10)) is PutOutcome.STORED
        assert buffer.put("g", 3, bytes(10)) is PutOutcome.STORED
        take(buffer, ledger, 1)
        assert buffer.put("g", 4, bytes(10)) is PutOutcome.FULL, "the learner has what it waited for"
        assert buffer.commit(taken.number, taken.chain) == 1

    def test_over_the_cap_a_dead_holder_of_the_oldest_holds_nobody_up(self, lane, buffer, ledger):
        """Generators that keep a group lease nothing: nobody would ask for the oldest and end its lease."""
        buffer.lease("dead", 1)
        buffer.lease("g", 3)
        assert buffer.put("g", 2, bytes(1000)) is PutOutcome.STORED
        assert buffer.take(ledger, 2, window=1) is None
        assert buffer.put("g", 3, bytes(10)) is PutOutcome.FULL, "the oldest may still come"
        lane.expire()
        assert buffer.put("g", 3, bytes(10)) is PutOutcome.STORED

    def test_the_last_failure_puts_the_tombstone_in_the_groups_place(self, buffer, ledger):
        buffer.lease("a", 1)
        assert not buffer.fail("a", 1, "why", b"tombstone")
        assert ids(buffer.lease("b", 1)) == [1]
        assert not buffer.fail("a", 1, "not the holder any more", b"tombstone")
        assert buffer.fail("b", 1, "why", b"tombstone")
        assert buffer.fail("b", 1, "the reply was lost", b"tombstone"), "asked again, the same answer"
        assert buffer.put("b", 1, b"after all") is PutOutcome.DUPLICATE
        assert buffer.frames(take(buffer, ledger, 1).ids) == [b"tombstone"]
        counters = buffer.audit().counters
        assert (counters["failed"], counters["dead"]) == (2, 1)

    # -- takes

    def test_a_take_is_all_or_none(self, buffer, ledger):
        fill(buffer, 3)
        assert buffer.take(ledger, 4, window=9) is None
        assert places(buffer)["ready"] == 3
        assert take(buffer, ledger, 3).ids == (1, 2, 3)

    @pytest.mark.parametrize(("window", "expected"), [(1, None), (3, None), (4, (2, 3, 5)), (100, (2, 3, 5))])
    def test_younger_groups_overtake_the_oldest_only_within_the_window(
        self, buffer, ledger, window, expected
    ):
        buffer.lease("g", 8)
        for ticket_id in (3, 2, 5, 8):
            buffer.put("g", ticket_id, b"x")
        taken = buffer.take(ledger, 3, window=window)
        assert (taken and taken.ids) == (expected if window != 4 else None)
        if window == 4:
            assert buffer.take(ledger, 2, window=4).ids == (2, 3), "id 5 is 1 + 4"

    def test_the_window_is_anchored_at_ids_that_wait_to_be_issued_again_too(self, buffer, ledger):
        buffer.lease("g", 4)
        for ticket_id in (2, 3):
            buffer.put("g", ticket_id, b"x")
        buffer.give_back("g", [1])
        assert buffer.take(ledger, 2, window=2) is None
        assert buffer.take(ledger, 2, window=3).ids == (2, 3)

    def test_asking_again_gives_the_same_take(self, buffer, ledger):
        fill(buffer, 6)
        first = buffer.take(ledger, 3, window=1)
        assert (
            buffer.take(ledger, 3, window=1)
            == first
            == Take(number=1, ids=(1, 2, 3), chain=next_chain(ledger.chain, (1, 2, 3)))
        )
        ledger.consume(first.ids)
        second = buffer.take(ledger, 3, window=1)
        assert second.ids == (4, 5, 6)
        assert second.number == 2

    def test_a_ledger_of_another_history_is_refused(self, buffer, ledger):
        fill(buffer, 6)
        take(buffer, ledger, 2)
        other = Ledger()
        other.consume((2, 1))
        with pytest.raises(BufferGap):
            buffer.take(other, 2, window=1)
        ahead = Ledger.from_dict(ledger.to_dict())
        ahead.consume((3, 4))
        with pytest.raises(BufferGap):
            buffer.take(ahead, 2, window=1)
        assert places(buffer)["ready"] == 4
        take(buffer, ledger, 2)
        with pytest.raises(BufferGap):
            buffer.take(other, 2, window=1)  # take 2 is assigned, but after another take 1

    def test_frames_come_in_the_order_asked_for_and_a_lost_one_is_a_gap(self, buffer):
        fill(buffer, 3)
        assert buffer.frames([3, 1]) == [FRAME % 3, FRAME % 1]
        assert buffer.frames([]) == []
        with pytest.raises(BufferGap, match="7"):
            buffer.frames([1, 7])

    def test_a_rejected_frame_is_sampled_again_and_the_take_goes_on_without_it(self, buffer, ledger):
        fill(buffer, 4)
        whole = buffer.take(ledger, 3, window=1)
        short = buffer.reject_frame(whole, 2, FRAME % 2, "no frame of ours")
        assert short.ids == (1, 3)
        assert buffer.reject_frame(whole, 2, FRAME % 2, "the reply was lost") == short
        assert buffer.take(ledger, 3, window=1) == short
        shorter = buffer.reject_frame(short, 1, FRAME % 1, "neither")
        assert shorter == Take(number=1, ids=(3,), chain=next_chain(ledger.chain, (3,)))
        ledger.consume(shorter.ids)
        assert ledger.chain == shorter.chain
        assert ids(buffer.lease("h", 2)) == [1, 2]
        assert buffer.put("h", 1, b"better") is PutOutcome.STORED
        assert buffer.put("h", 2, b"better") is PutOutcome.STORED
        assert take(buffer, ledger, 3).ids == (1, 2, 4)
        assert buffer.audit().counters["rejected_frames"] == 2

    def test_a_frame_refused_for_the_last_time_leaves_an_empty_one_and_the_take_whole(self, buffer, ledger):
        fill(buffer, 3)
        ledger.consume(
            buffer.reject_frame(buffer.take(ledger, 2, window=1), 1, FRAME % 1, "no frame of ours").ids
        )
        assert ids(buffer.lease("h", 1)) == [1]
        buffer.put("h", 1, b"as bad")
        whole = buffer.take(ledger, 2, window=1)
        assert whole.ids == (1, 3)
        before = buffer.audit().payload_bytes
        for _ in range(2):  # the second call: the reply was lost
            assert buffer.reject_frame(whole, 1, b"as bad", "again") == whole
        assert buffer.take(ledger, 2, window=1) == whole
        assert buffer.frames(whole.ids) == [GIVEN_UP + b"again", FRAME % 3]
        counters, freed = buffer.audit().counters, before - buffer.audit().payload_bytes
        assert (counters["rejected_frames"], counters["dead"], freed) == (
            2,
            1,
            len(b"as bad") - len(GIVEN_UP + b"again"),
        )
        assert places(buffer)["reissue"] == 0
        assert buffer.put("h", 1, b"late") is PutOutcome.DUPLICATE
        buffer.recover(ledger, version=0, limit=9)  # another learner, perhaps
        assert buffer.take(ledger, 2, window=1) == whole
        assert buffer.frames(whole.ids) == [GIVEN_UP + b"again", FRAME % 3]
        ledger.consume(whole.ids)
        assert buffer.commit(whole.number, whole.chain) == 2
        assert places(buffer)["done"] == 3

    def test_another_frame_than_the_refused_one_stays(self, buffer, ledger):
        """The store lost a bad frame and got a good one for the same id and take; then the refusal comes."""
        fill(buffer, 3)
        whole = buffer.take(ledger, 3, window=1)
        before = buffer.audit()
        for other in (b"bad", GIVEN_UP + b"before"):
            assert buffer.reject_frame(whole, 2, other, "no frame of ours") == whole
        assert buffer.audit() == before
        assert buffer.frames(whole.ids) == [FRAME % i for i in whole.ids]

    def test_a_take_that_others_follow_keeps_an_empty_frame_at_once(self, buffer, ledger):
        fill(buffer, 5)
        first = buffer.take(ledger, 2, window=1)
        after = Ledger.from_dict(ledger.to_dict())
        after.consume(first.ids)
        second = take(buffer, after, 2)
        for _ in range(2):
            assert buffer.reject_frame(first, 1, FRAME % 1, "the store has lost that it was refused") == first
        assert buffer.frames(first.ids) == [GIVEN_UP + b"the store has lost that it was refused", FRAME % 2]
        assert buffer.audit().counters["dead"] == 1
        assert (places(buffer)["taken"], places(buffer)["reissue"]) == (4, 0)
        buffer.recover(ledger, version=0, limit=9)
        assert take(buffer, ledger, 2) == first
        assert take(buffer, ledger, 2) == second

    def test_a_frame_of_lost_weights_costs_no_attempt_and_undoes_later_takes(self, buffer, ledger):
        fill(buffer, 5)
        first = buffer.take(ledger, 2, window=1)
        after = Ledger.from_dict(ledger.to_dict())
        after.consume(first.ids)
        take(buffer, after, 2)
        for _ in range(2):  # the second call: the reply was lost
            short = buffer.reject_frame(first, 1, FRAME % 1, "lost", old=True)
        assert short.ids == (2,)
        assert buffer.take(ledger, 2, window=1) == short
        assert ids(buffer.lease("h", 1)) == [1]
        assert not buffer.fail("h", 1, "one attempt of two", b"tombstone")
        assert (places(buffer)["taken"], places(buffer)["ready"], places(buffer)["reissue"]) == (1, 3, 1)
        ledger.consume(short.ids)
        assert ids(buffer.lease("h", 1)) == [1]
        buffer.put("h", 1, b"better")
        assert take(buffer, ledger, 4).ids == (1, 3, 4, 5)

    def test_a_frame_that_is_set_aside_gets_no_other_attempt(self, buffer, ledger):
        """It decodes but must not be digested: its reason replaces it, for this learner and later ones."""
        fill(buffer, 3)
        whole = buffer.take(ledger, 3, window=1)
        for _ in range(2):  # the second call: the reply was lost
            assert buffer.reject_frame(whole, 2, FRAME % 2, "untrainable:\n 7", final=True) == whole
        given_up = GIVEN_UP + b"untrainable: 7"
        assert buffer.frames(whole.ids) == [FRAME % 1, given_up, FRAME % 3]
        assert buffer.reject_frame(whole, 2, given_up, "again", final=True) == whole
        assert buffer.frames(whole.ids)[1] == given_up
        audit = buffer.audit()
        assert (audit.counters["rejected_frames"], audit.counters["dead"]) == (1, 1)
        assert audit.payload_bytes == len(FRAME % 1) + len(FRAME % 3) + len(given_up)
        buffer.recover(ledger, version=0, limit=9)
        assert take(buffer, ledger, 3) == whole
        assert buffer.commit(whole.number, whole.chain) == 3
        assert (places(buffer)["done"], buffer.audit().payload_bytes) == (3, 0)

    def test_only_a_take_of_this_history_can_be_shortened(self, buffer, ledger):
        fill(buffer, 2)
        whole = buffer.take(ledger, 2, window=1)
        with pytest.raises(BufferGap, match="take 1 with this chain"):
            buffer.reject_frame(
                Take(number=1, ids=whole.ids, chain=ledger.chain), 1, FRAME % 1, "another history"
            )
        with pytest.raises(BufferGap, match="take 2 with this chain"):
            buffer.reject_frame(
                Take(number=2, ids=whole.ids, chain=whole.chain), 1, FRAME % 1, "not taken yet"
            )
        assert places(buffer)["taken"] == 2

    def test_a_take_may_lose_all_its_ids(self, buffer, ledger):
        fill(buffer, 1)
        empty = buffer.reject_frame(buffer.take(ledger, 1, window=1), 1, FRAME % 1, "bad")
        assert empty.ids == ()
        assert buffer.take(ledger, 1, window=1) == empty
        ledger.consume(empty.ids)
        fill(buffer, 1)
        taken = take(buffer, ledger, 1)
        assert buffer.commit(taken.number, taken.chain) == 1

    # -- commits

    def test_a_commit_forgets_all_takes_up_to_it_once(self, buffer, ledger):
        fill(buffer, 8)
        first, second, third = (take(buffer, ledger, 2) for _ in range(3))
        assert buffer.commit(second.number, second.chain) == 4
        assert buffer.commit(second.number, second.chain) == 0
        assert buffer.commit(first.number, first.chain) == 0
        assert places(buffer) == {"issued": 8, "leased": 0, "reissue": 0, "ready": 2, "taken": 2, "done": 4}
        with pytest.raises(BufferGap):
            buffer.frames(first.ids)
        assert len(buffer.frames(third.ids)) == 2

    def test_a_commit_of_another_history_is_refused_and_changes_nothing(self, buffer, ledger):
        fill(buffer, 4)
        taken = take(buffer, ledger, 2)
        with pytest.raises(BufferGap):
            buffer.commit(taken.number, next_chain(taken.chain, ()))
        with pytest.raises(BufferGap):
            buffer.commit(taken.number + 1, taken.chain)
        assert places(buffer)["taken"] == 2

    # -- recovery

    def test_version_and_limit_only_grow_until_a_recovery_sets_them(self, buffer, ledger):
        buffer.set_version(5, limit=20)
        buffer.set_version(4, limit=10)
        lease = buffer.lease("g", 18)
        assert (lease.tickets[-1].minimum_version, len(lease.tickets)) == (5 - 2 // 4, 18)
        buffer.recover(ledger, version=2, limit=6)
        buffer.revoke("g")
        lease = buffer.lease("g", 18)
        assert (lease.tickets[-1].minimum_version, ids(lease)) == (2, [1, 2, 3, 4, 5, 6]), (
            "ids beyond the credit wait, also when issued before"
        )

    def test_the_newer_learner_fences_the_older(self, lane, buffer, ledger):
        fill(buffer, 4)
        newer = lane.handle()
        newer.recover(ledger, version=0, limit=8)
        taken = Take(number=1, ids=(1,), chain=ledger.chain)
        for call in (
            lambda: buffer.take(ledger, 1, window=1),
            lambda: buffer.reject_frame(taken, 1, b"bad", ""),
            lambda: buffer.commit(1, ledger.chain),
            lambda: buffer.set_version(9, limit=99),
            lambda: buffer.close(),
        ):
            with pytest.raises(BufferFenced):
                call()
        lease = newer.lease("g", 9)
        assert (ids(lease), lease.closed) == ([5, 6, 7, 8], False)

    def test_a_learner_that_another_has_followed_takes_nothing_back(self, lane, buffer, ledger):
        """Its call to recover was held up on the way, or in a store that hung, and it has died since."""
        newer = lane.handle()
        newer.recover(ledger, version=3, limit=8)
        with pytest.raises(BufferFenced):
            buffer.recover(ledger, version=0, limit=99)
        newer.set_version(4, limit=8)
        assert ids(newer.lease("g", 99)) == list(range(1, 9))

    def test_a_resumed_learner_gets_the_same_takes_again(self, lane, buffer, ledger):
        fill(buffer, 8)
        saved = ledger.to_dict()
        before = [take(buffer, ledger, 2) for _ in range(3)]
        resumed, again = lane.handle(), Ledger.from_dict(saved)
        resumed.recover(again, version=0, limit=8)
        assert [take(resumed, again, 2) for _ in range(3)] == before
        assert take(resumed, again, 2).ids == (7, 8)

    def test_a_smaller_batch_after_a_restart_is_assigned_anew(self, lane, buffer, ledger):
        fill(buffer, 6)
        saved = ledger.to_dict()
        take(buffer, ledger, 3)
        take(buffer, ledger, 3)
        resumed, again = lane.handle(), Ledger.from_dict(saved)
        resumed.recover(again, version=0, limit=8)
        assert take(resumed, again, 2).ids == (1, 2)
        assert take(resumed, again, 4).ids == (3, 4, 5, 6)

    def test_the_ledger_wins_over_a_store_that_is_behind(self, lane, buffer, ledger):
        """As after a rollback: the store still offers what the weights already hold."""
        fill(buffer, 6)
        buffer.lease("g", 2)
        ahead = Ledger()
        ahead.consume((1, 2))
        ahead.consume((4, 7))
        learner = lane.handle()
        learner.recover(ahead, version=2, limit=12)
        assert places(learner) == {"issued": 8, "leased": 1, "reissue": 0, "ready": 3, "taken": 0, "done": 4}
        assert take(learner, ahead, 3).ids == (3, 5, 6)
        assert learner.put("g", 7, b"x") is PutOutcome.DUPLICATE
        assert ids(learner.lease("h", 9)) == [9, 10, 11, 12]

    def test_the_ledger_wins_over_a_store_that_is_ahead(self, lane, buffer, ledger):
        """As when the newest checkpoint is damaged: what the store has forgotten is sampled again."""
        fill(buffer, 6)
        saved = ledger.to_dict()
        for _ in range(2):
            taken = take(buffer, ledger, 2)
        buffer.commit(taken.number, taken.chain)
        learner, older = lane.handle(), Ledger.from_dict(saved)
        learner.recover(older, version=0, limit=8)
        assert places(learner) == {"issued": 6, "leased": 0, "reissue": 4, "ready": 2, "taken": 0, "done": 0}
        assert ids(learner.lease("g", 9)) == [1, 2, 3, 4, 7, 8]

    def test_the_ledger_wins_over_what_was_done_out_of_order(self, lane, buffer, ledger):
        buffer.lease("g", 6)
        buffer.fail("g", 2, "why", b"tombstone")
        assert ids(buffer.lease("g", 1)) == [2]
        for ticket_id in (2, 4, 5):
            buffer.put("g", ticket_id, b"x")
        taken = take(buffer, ledger, 3, window=100)
        buffer.commit(taken.number, taken.chain)
        learner, older = lane.handle(), Ledger()
        learner.recover(older, version=0, limit=8)
        assert places(learner) == {"issued": 6, "leased": 3, "reissue": 3, "ready": 0, "taken": 0, "done": 0}
        assert ids(learner.lease("h", 3)) == [2, 4, 5]
        assert not learner.fail("h", 2, "why", b"tombstone"), "a consumed id starts with no failures"

    def test_an_assignment_that_does_not_go_on_from_the_ledger_is_undone(self, lane, buffer, ledger):
        fill(buffer, 6)
        take(buffer, ledger, 3)
        take(buffer, ledger, 2)
        other = Ledger()
        other.consume((6,))
        learner = lane.handle()
        learner.recover(other, version=0, limit=8)
        assert places(learner) == {"issued": 6, "leased": 0, "reissue": 0, "ready": 5, "taken": 0, "done": 1}
        assert take(learner, other, 5).ids == (1, 2, 3, 4, 5)

    def test_a_wiped_store_is_rebuilt_from_the_ledger(self, lane, buffer, ledger):
        fill(buffer, 8)
        take(buffer, ledger, 3)
        taken = take(buffer, ledger, 2)
        lane.wipe()
        assert lane.handle().lease("g", 3).tickets == ()
        with pytest.raises(BufferGap):
            buffer.set_version(3, limit=40)
        buffer.recover(ledger, version=3, limit=12)
        assert places(buffer) == {"issued": 5, "leased": 0, "reissue": 0, "ready": 0, "taken": 0, "done": 5}
        assert buffer.put("g", 8, b"held by a generator") is PutOutcome.UNKNOWN
        assert buffer.commit(taken.number, taken.chain) == 0, "a checkpoint made before is acknowledged late"
        assert fill(buffer, 3) == [6, 7, 8]
        assert take(buffer, ledger, 3).ids == (6, 7, 8)

    def test_gaps_below_the_highest_consumed_id_are_sampled_again_after_a_wipe(self, lane, buffer, ledger):
        ledger.consume((1, 2, 5, 9))
        lane.wipe()
        buffer.recover(ledger, version=0, limit=10)
        assert ids(buffer.lease("g", 99)) == [3, 4, 6, 7, 8, 10]

    def test_two_learners_of_one_wiped_store_cannot_both_go_on(self, lane, buffer, ledger):
        lane.wipe()
        other = lane.handle()
        other.recover(ledger, version=0, limit=8)
        with pytest.raises(BufferFenced):
            buffer.take(ledger, 1, window=1)

    def test_a_zombie_is_fenced_also_after_the_store_forgot_who_was_newer(self, lane, buffer, ledger):
        middle, newest = lane.handle(), lane.handle()
        for learner in (middle, newest):
            learner.recover(ledger, version=0, limit=8)
        lane.wipe()
        newest.recover(ledger, version=0, limit=8)
        for zombie in (buffer, middle):
            with pytest.raises(BufferFenced):
                zombie.set_version(1, limit=8)
        newest.set_version(1, limit=8)
