"""The buffer in one process: the shortest complete statement of the protocol."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from asyncrl.algo.staleness import choose, minimum_version
from asyncrl.buffer import base
from asyncrl.buffer.base import GIVEN_UP, Audit, BufferRules, DeadLetter, Lease, PutOutcome, Take, one_line
from asyncrl.buffer.ledger import EMPTY_CHAIN, Ledger, next_chain
from asyncrl.errors import BufferFenced, BufferGap
from asyncrl.lineage import INITIAL, History
from asyncrl.types import Ticket

FOLLOWED = "another learner has the run, this one must stop"


@dataclass(slots=True)
class _Lease:
    holder: str
    ends_s: float


@dataclass(slots=True)
class _Assignment:
    """One take, with the chain before and after it."""

    previous: str
    chain: str
    ids: tuple[int, ...]
    # The chain before the last rejection, because a call to reject may be repeated.
    unshortened: str = ""


@dataclass(slots=True)
class _Store:
    """The state, and changes that several operations share. An issued id is in exactly one place."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    epoch: int = 0
    owner: object = None  # the handle that recovered last
    version: int = 0
    limit: int = 0
    history: History = INITIAL
    closed: bool = False
    starving: bool = False
    issued: int = 0
    leases: dict[int, _Lease] = field(default_factory=dict)
    reissue: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    takes: dict[int, _Assignment] = field(default_factory=dict)
    last: int = 0
    chain: str = EMPTY_CHAIN
    committed: int = 0
    watermark: int = 0
    done: set[int] = field(default_factory=set)
    frames: dict[int, bytes] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    deaths: Counter[int] = field(default_factory=Counter)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def anchor(self) -> int:
        """The oldest unfinished id, or the next id to be issued."""
        return min([*self.leases, *self.reissue], default=self.issued + 1)

    @property
    def stored_bytes(self) -> int:
        return sum(map(len, self.frames.values()))

    def is_done(self, ticket_id: int) -> bool:
        return ticket_id <= self.watermark or ticket_id in self.done

    def store(self, ticket_id: int, frame: bytes) -> None:
        self.leases.pop(ticket_id, None)
        self.reissue.discard(ticket_id)
        self.deaths.pop(ticket_id, None)
        self.frames[ticket_id] = frame
        self.ready.add(ticket_id)

    def issue_again(self, ids: Iterable[int]) -> int:
        ids = list(ids)
        for ticket_id in ids:
            self.leases.pop(ticket_id, None)
            self.reissue.add(ticket_id)
        return len(ids)

    def lost_by_holder(self, ids: list[int]) -> int:
        """Issue again the ids of a holder that died, or lost its lease. Returns their number."""
        self.deaths.update(ids)
        self.counters["deaths"] += len(ids)
        return self.issue_again(ids)

    def held(self, holder: str, ids: Iterable[int]) -> list[int]:
        return [i for i in ids if i in self.leases and self.leases[i].holder == holder]

    def unassign_from(self, number: int) -> None:
        """Undo the takes from `number` on; their groups are ready again."""
        for later in range(self.last, number - 1, -1):
            assignment = self.takes.pop(later)
            self.ready.update(assignment.ids)
            self.last, self.chain = later - 1, assignment.previous

    def finish(self, ids: Iterable[int]) -> None:
        for ticket_id in ids:
            for place in (self.frames, self.attempts, self.deaths):
                place.pop(ticket_id, None)
            self.done.add(ticket_id)
        while self.watermark + 1 in self.done:
            self.watermark += 1
            self.done.discard(self.watermark)


class MemoryBuffer:
    """One handle on a buffer in this process. `Buffer` has the contract."""

    def __init__(self, rules: BufferRules, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._store = _Store()
        self._epoch = 0

    def peer(self) -> "MemoryBuffer":
        """Return another handle on the same buffer, such as another process would have."""
        other = MemoryBuffer(self._rules, clock=self._clock)
        other._store = self._store
        return other

    # -- generators

    def lease(self, holder: str, count: int) -> Lease:
        store = self._store
        with store.lock:
            self._expire()
            ids = [] if store.closed else self._leasable(holder, count)
            store.issued = max(store.issued, *ids, 0)
            tickets = []
            for ticket_id in ids:
                store.reissue.discard(ticket_id)
                store.leases[ticket_id] = _Lease(holder, self._clock() + self._rules.lease_s)
                minimum = minimum_version(
                    ticket_id, version=store.version, limit=store.limit, groups=self._rules.groups
                )
                tickets.append(Ticket(id=ticket_id, minimum_version=minimum, history=store.history))
            return Lease(tickets=tuple(tickets), closed=store.closed)

    def _leasable(self, holder: str, count: int) -> list[int]:
        """No ids while `holder` has a suspect; a waiting suspect if it has no ticket; else the lowest ids."""
        store, held = self._store, self._store.held(holder, self._store.leases)
        least = max(self._rules.max_deaths - base.ALONE_DEATHS, 1)
        suspects = {i for i, deaths in store.deaths.items() if deaths >= least}
        waiting = [i for i in sorted(store.reissue) if i <= store.limit]
        alone = [i for i in waiting if i in suspects and store.deaths[i] < self._rules.max_deaths]
        if suspects.intersection(held):
            return []
        if alone:
            return alone[: not held]
        new = range(store.issued + 1, store.limit + 1)[:count]
        return [*(i for i in waiting if i not in suspects), *new][:count]

    def _expire(self) -> None:
        expired = [i for i, lease in self._store.leases.items() if lease.ends_s <= self._clock()]
        self._store.counters["lease_expired"] += self._store.lost_by_holder(expired)

    def renew(self, holder: str, ids: Iterable[int]) -> None:
        with self._store.lock:
            for ticket_id in self._store.held(holder, ids):
                self._store.leases[ticket_id].ends_s = self._clock() + self._rules.lease_s

    def put(self, holder: str, ticket_id: int, frame: bytes) -> PutOutcome:
        """Store a group, also from a holder whose lease has expired if no other holder has stored it."""
        with self._store.lock:
            outcome = self._put_outcome(ticket_id, len(frame))
            if outcome is PutOutcome.STORED:
                self._store.store(ticket_id, frame)
            self._store.counters["put" if outcome is PutOutcome.STORED else outcome.value] += 1
            return outcome

    def _put_outcome(self, ticket_id: int, frame_bytes: int) -> PutOutcome:
        store = self._store
        if store.is_done(ticket_id) or ticket_id in store.frames:
            return PutOutcome.DUPLICATE
        if ticket_id > store.issued:
            return PutOutcome.UNKNOWN
        if store.stored_bytes + frame_bytes <= self._rules.max_bytes:
            return PutOutcome.STORED
        # Younger groups may fill the store while the learner waits for the oldest, so refusing the oldest
        # would be a deadlock. If no generator has the oldest, refusing any group would also be a deadlock,
        # because a generator that keeps a group leases nothing.
        self._expire()
        is_awaited = ticket_id == store.anchor or store.anchor in store.reissue
        return PutOutcome.STORED if store.starving and is_awaited else PutOutcome.FULL

    def give_back(self, holder: str, ids: Iterable[int]) -> None:
        store = self._store
        with store.lock:
            store.counters["returned"] += store.issue_again(store.held(holder, ids))

    def fail(self, holder: str, ticket_id: int, reason: str, tombstone: bytes) -> bool:
        """Count an attempt; the last one stores the tombstone. A repeated call returns the same value."""
        store = self._store
        with store.lock:
            if not store.held(holder, [ticket_id]):
                return store.attempts[ticket_id] >= self._rules.max_attempts and ticket_id in store.frames
            store.counters["failed"] += 1
            if not self._is_last_attempt(ticket_id, self._rules.max_attempts):
                return False
            store.store(ticket_id, tombstone)
            return True

    # -- the learner

    def recover(self, ledger: Ledger, *, version: int, limit: int, history: History = INITIAL) -> None:
        """Rebuild every place from the ledger, the takes that continue it, and the stored frames."""
        store = self._store
        with store.lock:
            if store.owner is not self:
                if 0 < self._epoch <= store.epoch:
                    raise BufferFenced(FOLLOWED)
                store.epoch, store.owner = max(store.epoch, self._epoch) + 1, self
            self._epoch = store.epoch
            store.issued = max(store.issued, ledger.watermark, *ledger.above, 0)
            store.watermark, store.done = ledger.watermark, set(ledger.above)
            kept = self._continued(ledger)
            taken = {i for assignment in kept.values() for i in assignment.ids}
            unconsumed = set(range(store.watermark + 1, store.issued + 1)) - store.done
            store.frames = {i: frame for i, frame in store.frames.items() if i in unconsumed}
            store.ready = store.frames.keys() - taken
            missing = unconsumed - store.frames.keys()
            store.leases = {i: lease for i, lease in store.leases.items() if i in missing}
            store.reissue = missing - store.leases.keys()
            store.takes, store.committed = kept, ledger.takes
            for counts in (store.attempts, store.deaths):
                for ticket_id in counts.keys() - unconsumed:
                    del counts[ticket_id]
            store.last = ledger.takes + len(kept)
            store.chain = kept[store.last].chain if kept else ledger.chain
            store.version, store.limit, store.history = version, limit, history
            store.closed, store.starving = False, False

    def _continued(self, ledger: Ledger) -> dict[int, _Assignment]:
        """Return the takes that continue the ledger's chain without a gap and whose groups are all stored."""
        store, chain, kept = self._store, ledger.chain, {}
        number = ledger.takes + 1
        while (assignment := store.takes.get(number)) is not None and assignment.previous == chain:
            if any(store.is_done(i) or i not in store.frames for i in assignment.ids):
                break
            kept[number], chain = assignment, assignment.chain
            number += 1
        return kept

    def take(self, ledger: Ledger, count: int, *, window: int) -> Take | None:
        """Assign the lowest `count` ready ids if the window allows it."""
        store, number = self._store, ledger.takes + 1
        with store.lock:
            self._check_epoch()
            assignment = store.takes.get(number)
            if assignment is not None and assignment.previous == ledger.chain:
                if len(assignment.ids) <= count:
                    return Take(number=number, ids=assignment.ids, chain=assignment.chain)
                # The take is of a larger batch, from before a restart with a smaller one.
                store.unassign_from(number)
            if number != store.last + 1 or ledger.chain != store.chain:
                raise BufferGap(f"take {number} does not follow the store's take {store.last}; recover")
            self._give_up_deadly()
            ids = choose(sorted(store.ready), anchor=store.anchor, count=count, window=window)
            store.starving = ids is None
            if ids is None:
                return None
            assignment = _Assignment(ledger.chain, next_chain(ledger.chain, tuple(ids)), tuple(ids))
            store.ready.difference_update(ids)
            store.takes[number], store.last, store.chain = assignment, number, assignment.chain
            return Take(number=number, ids=assignment.ids, chain=assignment.chain)

    def _give_up_deadly(self) -> None:
        """Give up the tickets that reached `max_deaths`."""
        store = self._store
        for ticket_id in sorted(store.reissue):
            if (deaths := store.deaths[ticket_id]) >= self._rules.max_deaths:
                died = f"{deaths} generators died, or lost their lease, while they had this ticket"
                reason = f"{base.DEADLY}: {died}"
                store.dead_letters.append(DeadLetter(id=ticket_id, reason=reason))
                store.store(ticket_id, GIVEN_UP + reason.encode())
                store.counters["dead"] += 1

    def frames(self, ids: Sequence[int]) -> list[bytes]:
        with self._store.lock:
            missing = [i for i in ids if i not in self._store.frames]
            if missing:
                raise BufferGap(f"the store has no frame of ids {missing}; recover")
            return [self._store.frames[i] for i in ids]

    def reject_frame(
        self, take: Take, ticket_id: int, frame: bytes, reason: str, *, final: bool = False, old: bool = False
    ) -> Take:
        store = self._store
        with store.lock:
            self._check_epoch()
            assignment = store.takes.get(take.number)
            if assignment is None or take.chain not in (assignment.chain, assignment.unshortened):
                raise BufferGap(f"the store does not know take {take.number} with this chain; recover")
            is_there = ticket_id in assignment.ids and store.frames.get(ticket_id) == frame
            if take.chain == assignment.chain and is_there and not frame.startswith(GIVEN_UP):
                reason = one_line(reason)
                store.dead_letters.append(DeadLetter(id=ticket_id, reason=reason))
                del store.frames[ticket_id]
                store.counters["rejected_frames"] += 1
                most = self._rules.max_attempts if take.number == store.last and not final else 0
                if old:
                    store.unassign_from(take.number + 1)
                    store.issue_again([ticket_id])
                elif self._is_last_attempt(ticket_id, most):
                    store.frames[ticket_id] = GIVEN_UP + reason.encode()
                if ticket_id not in store.frames:
                    ids, previous = tuple(i for i in assignment.ids if i != ticket_id), assignment.previous
                    assignment = _Assignment(previous, next_chain(previous, ids), ids, assignment.chain)
                    store.takes[take.number], store.chain = assignment, assignment.chain
            return Take(number=take.number, ids=assignment.ids, chain=assignment.chain)

    def _is_last_attempt(self, ticket_id: int, most: int) -> bool:
        """Count a failed attempt. Returns True if the ticket is dead now; else the id is issued again."""
        store = self._store
        store.attempts[ticket_id] += 1
        if store.attempts[ticket_id] < most:
            store.issue_again([ticket_id])
            return False
        store.counters["dead"] += 1
        return True

    def commit(self, number: int, chain: str) -> int:
        store = self._store
        with store.lock:
            self._check_epoch()
            if number <= store.committed:
                return 0
            if number not in store.takes or store.takes[number].chain != chain:
                raise BufferGap(f"the store does not know take {number} with this chain; recover")
            ids = [i for n in range(store.committed + 1, number + 1) for i in store.takes.pop(n).ids]
            store.finish(ids)
            store.committed = number
            return len(ids)

    def set_version(self, version: int, *, limit: int, waiting: bool = False) -> None:
        with self._store.lock:
            self._check_epoch()
            self._store.starving = self._store.starving or waiting
            self._store.version = max(self._store.version, version)
            self._store.limit = max(self._store.limit, limit)

    def revoke(self, holder: str) -> int:
        store = self._store
        with store.lock:
            count = store.lost_by_holder(store.held(holder, list(store.leases)))
            store.counters["returned"] += count
            return count

    def dead_letters(self) -> list[DeadLetter]:
        with self._store.lock:
            return self._store.dead_letters[: -base.DEAD_LETTERS - 1 : -1]

    def close(self) -> None:
        with self._store.lock:
            self._check_epoch()
            self._store.closed = True

    def audit(self) -> Audit:
        store = self._store
        with store.lock:
            return Audit(
                issued=store.issued,
                leased=len(store.leases),
                reissue=len(store.reissue),
                ready=len(store.ready),
                taken=sum(len(assignment.ids) for assignment in store.takes.values()),
                done=store.watermark + len(store.done),
                payload_bytes=store.stored_bytes,
                counters=dict(store.counters),
            )

    def _check_epoch(self) -> None:
        if self._store.epoch < self._epoch:
            found = f"the store is behind epoch {self._epoch}: it was rolled back or wiped"
            raise BufferGap(f"{found}; recover from the ledger")
        if self._store.owner is not self:
            raise BufferFenced(FOLLOWED)
