"""A random walk over everything that can happen to a lane, made by several implementations at once.

They must answer alike at every step; every issued id must be in one place; no lineage of checkpoints may
consume an id twice (the ledger refuses that); and at the end every id up to the limit can still be consumed.
"""

from hypothesis import strategies as st

from asyncrl.buffer.base import GIVEN_UP, BufferRules, PutOutcome, Take
from asyncrl.buffer.ledger import Ledger
from asyncrl.errors import BufferFenced, BufferGap

WALK_RULES = BufferRules(groups=3, lease_s=1000.0, max_attempts=2, max_bytes=150)
MOST_IDS = 40
HOLDERS = ("a", "b", "c")


class Walk:
    def __init__(self, lanes, draw):
        self.lanes, self.draw = lanes, draw
        self.learners = [lane.handle() for lane in lanes]
        self.older = self.learners
        self.generators = [lane.handle() for lane in lanes]
        self.ledger, self.older_ledger = Ledger(), Ledger()
        self.checkpoint = self.ledger.to_dict()
        self.checkpoints = [self.checkpoint]
        self.snapshot = None
        self.last_take = None
        self.frames_made = 0
        self.frames_seen = {}
        self.recover()

    # -- all lanes at once

    def all(self, handles, call):
        """The one reply of all implementations."""
        replies = []
        for handle in handles:
            try:
                replies.append(call(handle))
            except (BufferGap, BufferFenced) as error:
                replies.append(type(error))
        assert all(reply == replies[0] for reply in replies), replies
        self.check_audits()
        return replies[0]

    def check_audits(self):
        audits = [lane.handle().audit() for lane in self.lanes]
        for audit in audits:
            assert audit.missing == 0, audit
            assert (
                min(
                    audit.issued,
                    audit.leased,
                    audit.reissue,
                    audit.ready,
                    audit.taken,
                    audit.done,
                    audit.payload_bytes,
                )
                >= 0
            )
            nonzero = {name: value for name, value in audit.counters.items() if value}
            audit.counters.clear()
            audit.counters.update(nonzero)
        assert all(audit == audits[0] for audit in audits), audits

    def learner(self, call):
        """A reply to the learner, which recovers with what it has when the store is not the one it knew."""
        reply = self.all(self.learners, call)
        assert reply is not BufferFenced, "no other learner is newer"
        if reply is BufferGap:
            self.last_take = None
            self.draw(st.sampled_from([self.recover, self.crash]))()
            return None
        return reply

    # -- what generators do

    def any_id(self):
        return self.draw(st.integers(1, MOST_IDS + 2))

    def holder(self):
        return self.draw(st.sampled_from(HOLDERS))

    def lease(self):
        holder, count = self.holder(), self.draw(st.integers(1, 6))
        lease = self.all(self.generators, lambda buffer: buffer.lease(holder, count))
        if self.draw(st.integers(0, 2)):
            for ticket in lease.tickets:
                self.store(holder, ticket.id)

    def store(self, holder, ticket_id):
        self.frames_made += 1
        frame = b"%d:%d" % (ticket_id, self.frames_made) + bytes(self.draw(st.sampled_from([0, 0, 20, 60])))
        return self.all(self.generators, lambda buffer: buffer.put(holder, ticket_id, frame))

    def put(self):
        self.store(self.holder(), self.any_id())

    def renew(self):
        holder, ticket_ids = self.holder(), [self.any_id(), self.any_id()]
        self.all(self.generators, lambda buffer: buffer.renew(holder, ticket_ids))

    def give_back(self):
        holder, ticket_ids = self.holder(), [self.any_id() for _ in range(3)]
        self.all(self.generators, lambda buffer: buffer.give_back(holder, ticket_ids))

    def fail(self):
        holder, ticket_id = self.holder(), self.any_id()
        self.all(
            self.generators, lambda buffer: buffer.fail(holder, ticket_id, "reason", b"%d:dead" % ticket_id)
        )

    def revoke(self):
        holder = self.holder()
        self.all(self.learners, lambda buffer: buffer.revoke(holder))

    def expire(self):
        for lane in self.lanes:
            lane.expire()

    # -- what the learner does

    def take(self):
        count, window = self.draw(st.integers(1, 4)), self.draw(st.sampled_from([1, 2, 4, 100]))
        self.last_take = self.learner(lambda buffer: buffer.take(self.ledger, count, window=window))
        if self.last_take is None:
            return
        frames = self.learner(lambda buffer: buffer.frames(self.last_take.ids))
        if frames is not None:
            self.frames_seen = dict(zip(self.last_take.ids, frames, strict=True))
            for ticket_id, frame in self.frames_seen.items():
                assert frame.startswith(GIVEN_UP) or int(frame.split(b":")[0]) == ticket_id
            if self.draw(st.integers(0, 4)) == 0 and self.last_take.ids:
                self.reject()
            elif self.draw(st.integers(0, 3)):
                self.consume()

    def consume(self):
        if self.last_take is not None and self.last_take.number == self.ledger.takes + 1:
            self.older_ledger = Ledger.from_dict(self.ledger.to_dict())
            self.ledger.consume(self.last_take.ids)
            assert self.ledger.chain == self.last_take.chain

    def reject(self):
        if (
            self.last_take is not None
            and self.last_take.ids
            and self.last_take.number == self.ledger.takes + 1
        ):
            whole, ticket_id = self.last_take, self.draw(st.sampled_from(self.last_take.ids))
            frame = self.draw(
                st.sampled_from([*[self.frames_seen.get(ticket_id, b"unseen")] * 4, b"another"])
            )
            how = self.draw(st.sampled_from([{}, {}, {"final": True}, {"old": True}]))
            self.last_take = self.learner(
                lambda buffer: buffer.reject_frame(whole, ticket_id, frame, "reason", **how)
            )

    def save(self):
        self.checkpoint = self.ledger.to_dict()
        self.checkpoints.append(self.checkpoint)
        if self.draw(st.booleans()):
            self.commit()

    def commit(self):
        saved = self.checkpoint
        self.learner(lambda buffer: buffer.commit(saved["takes"], saved["chain"]) and None)

    def set_version(self):
        version, limit = self.draw(st.integers(0, 9)), self.draw(st.integers(0, MOST_IDS))
        waiting = self.draw(st.booleans())
        self.learner(lambda buffer: buffer.set_version(version, limit=limit, waiting=waiting))

    def close(self):
        self.learner(lambda buffer: buffer.close())

    def recover(self):
        limit = self.draw(st.integers(0, MOST_IDS))
        self.last_take = None
        assert (
            self.all(self.learners, lambda buffer: buffer.recover(self.ledger, version=0, limit=limit))
            is None
        )

    def crash(self):
        """A new learner process with a checkpoint, mostly the last one; the old process may still live."""
        if self.draw(st.integers(0, 3)) == 0:
            kept = self.draw(st.integers(1, len(self.checkpoints)))
            del self.checkpoints[kept:]
            self.checkpoint = self.checkpoints[-1]
        self.older, self.older_ledger = self.learners, self.ledger
        self.ledger = Ledger.from_dict(self.checkpoint)
        self.learners = [lane.handle() for lane in self.lanes]
        self.recover()

    def zombie(self):
        """A learner that has been replaced and does not know it."""
        if self.older is self.learners:
            return
        ledger, number = self.older_ledger, self.older_ledger.takes
        taken = Take(number=number, ids=(1,), chain=ledger.chain)
        call = self.draw(
            st.sampled_from(
                [
                    lambda buffer: buffer.take(ledger, 2, window=100),
                    lambda buffer: buffer.commit(number, ledger.chain),
                    lambda buffer: buffer.reject_frame(taken, 1, b"frame", "reason"),
                    lambda buffer: buffer.set_version(99, limit=99),
                    lambda buffer: buffer.close(),
                ]
            )
        )
        # A rolled back store may be one that belongs to the zombie; the chain protects it, and the lock of
        # the run.
        if all(lane.owner_is_newest(self.learners) for lane in self.lanes):
            reply = self.all(self.older, call)
            assert reply in (BufferFenced, BufferGap)
            if reply is BufferFenced:  # a store that forgot more than the zombie knows would be the zombie's
                recovered = self.all(self.older, lambda buffer: buffer.recover(ledger, version=99, limit=99))
                assert recovered is BufferFenced

    # -- what the world does

    def wipe(self):
        for lane in self.lanes:
            lane.wipe()
        self.snapshot = None

    def save_snapshot(self):
        self.snapshot = [lane.snapshot() for lane in self.lanes]

    def roll_back(self):
        if self.snapshot is not None:
            for lane, snapshot in zip(self.lanes, self.snapshot, strict=True):
                lane.roll_back(snapshot)

    OFTEN = (lease, lease, lease, lease, put, take, take, take, take, take, save, set_version, set_version)
    RARE = (renew, give_back, fail, fail, revoke, expire, consume, reject, commit, close, recover)
    FAULTS = (crash, crash, zombie, wipe, save_snapshot, roll_back, roll_back)

    def run(self, steps):
        for _ in range(steps):
            self.draw(st.sampled_from(self.OFTEN * 2 + self.RARE + self.FAULTS))(self)
        self.drain()

    def drain(self):
        """Whatever happened, everything up to the limit can still be trained."""
        self.draw(st.sampled_from([self.recover, self.crash]))()
        self.expire()
        self.all(self.learners, lambda buffer: buffer.recover(self.ledger, version=0, limit=MOST_IDS))
        for _ in range(3 * MOST_IDS):
            if self.ledger.watermark == MOST_IDS:
                break
            self.last_take = self.learner(lambda buffer: buffer.take(self.ledger, 1, window=1))
            if self.last_take is None:
                lease = self.all(self.generators, lambda buffer: buffer.lease("z", 1))
                for ticket in lease.tickets:
                    assert self.store("z", ticket.id) is PutOutcome.STORED, (
                        "the awaited group is always let in"
                    )
            else:
                self.consume()
                self.save()
        assert (self.ledger.watermark, self.ledger.above) == (MOST_IDS, set())
