"""The distributed buffer: what generators and the learner may ask of it.

Every call is idempotent: after a lost reply the same call is simply made again. The protocol and why it
loses nothing and repeats nothing is in `docs/architecture.md`; the memory implementation is its shortest
complete statement, `functions.lua` the one that runs inside the store.

Life of a ticket id:   issued -> leased -> ready -> taken -> done
                                  |  ^
                                  v  |        lease ran out, given back, failed, rejected
                                reissue

A *take* is a numbered, hash-chained assignment of ready groups to the learner. An optimizer step needs one
take, or more when filters reject groups and the step is refilled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from asyncrl.buffer.ledger import Ledger
from asyncrl.lineage import INITIAL, History
from asyncrl.types import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Tickets handed to one generator."""

    tickets: tuple[Ticket, ...]
    # True when the run is over: stop leasing and leave.
    closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRules:
    """What all handles on one lane must agree on."""

    # B of the staleness bound; for the evaluation lane the number of prompts of one evaluation.
    groups: int
    lease_s: float = 60.0
    max_attempts: int = 3
    # Holders that may die, or lose their lease, while they have a ticket. The last `ALONE_DEATHS` of them
    # have nothing else of the lane: so a ticket that kills its holder is told from those that were only near
    # it.
    max_deaths: int = 5
    # Cap on stored frames. Over it a group is stored only while the learner waits: the oldest unfinished one,
    # or any while nobody has that one.
    max_bytes: int = 4 << 30


# Begins what stands in the place of a frame that nobody shall sample again; behind it why. No frame of ours
# begins so.
GIVEN_UP = b"given up: "


# A longer reason is cut.
REASON_CHARACTERS = 1000


def one_line(reason: str) -> str:
    """A reason as it is kept."""
    return " ".join(reason.split())[:REASON_CHARACTERS]


def kind_of(reason: str) -> str:
    """What a reason is counted as: the text before its first colon."""
    return reason.partition(":")[0]


ALONE_DEATHS = 2
# So many are kept, the newest.
DEAD_LETTERS = 100
# What the reason of a group begins with that is set aside because processes died of it.
DEADLY = "deadly"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A group that was set aside, or a frame that was refused."""

    id: int
    reason: str


class PutOutcome(StrEnum):
    """What became of a group that was offered."""

    STORED = "stored"
    # Already stored, taken or done: the generator forgets it.
    DUPLICATE = "duplicate"
    # Over the byte cap: the generator keeps the group, leases nothing, and tries again.
    FULL = "full"
    # Never issued by this store, because it was rolled back: the generator forgets it, the id will be issued
    # again.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Groups assigned to the learner under `number`; `chain` is the hash after it."""

    number: int
    ids: tuple[int, ...]
    chain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Where every issued id is. `issued` = sum of the others, always."""

    issued: int
    leased: int
    reissue: int
    ready: int
    taken: int
    done: int
    payload_bytes: int
    # put, duplicate, unknown, full, lease_expired, failed, dead, deaths, rejected_frames, returned.
    counters: dict[str, int]

    @property
    def missing(self) -> int:
        """Ids that are nowhere (> 0) or in two places (< 0): 0 in a correct buffer."""
        return self.issued - self.leased - self.reissue - self.ready - self.taken - self.done


class GeneratorBuffer(Protocol):
    """The side that a generator may see."""

    def lease(self, holder: str, count: int) -> Lease:
        """Up to `count` tickets under the credit limit: those that wait to be issued again, lowest first, then new ones.

        An expired lease is a death of its ticket's holder. A ticket that has cost `max_deaths` - `ALONE_DEATHS` holders is leased
        alone, to a holder that has nothing and is given nothing beside it; while one waits, others lease nothing before they
        have handed over what they have. After `max_deaths` the next take gives it up, with the reason in its place.
        """
        ...

    def renew(self, holder: str, ids: Iterable[int]) -> None:
        """Extend the leases of `ids` by the lease time; ids that `holder` no longer holds are ignored."""
        ...

    def put(self, holder: str, ticket_id: int, frame: bytes) -> PutOutcome:
        """Hand over a whole group."""
        ...

    def give_back(self, holder: str, ids: Iterable[int]) -> None:
        """Return tickets unused (leaving, dirty weights); not a failure."""
        ...

    def fail(self, holder: str, ticket_id: int, reason: str, tombstone: bytes) -> bool:
        """Return a ticket whose sampling or reward failed; True when that was its last attempt.

        On the last attempt `tombstone` (an encoded dead `Group`) takes the group's place, so that the
        learner meets it in order, counts it as dead and goes on.
        """
        ...


class LearnerBuffer(Protocol):
    """The side that the learner may see. Raises BufferFenced and BufferGap."""

    def recover(self, ledger: Ledger, *, version: int, limit: int, history: History = INITIAL) -> None:
        """Fence older learners and make the store agree with `ledger`, which wins; reopens a closed lane.

        From now on tickets carry `history`. A learner that recovered before, and that another has followed, gets BufferFenced.

        After BufferGap a live learner may recover with the ledger it holds in memory: if it dies before the next
        checkpoint, the ids that only this ledger had are issued again by the recovery from the checkpoint.
        """
        ...

    def take(self, ledger: Ledger, count: int, *, window: int) -> Take | None:
        """Assign the next `count` groups by the anchored window, all or none (None: not enough are ready).

        The number and the chain come from `ledger`; asking again for a number that is assigned returns
        the same ids. The caller enters the take into its ledger.
        """
        ...

    def frames(self, ids: Sequence[int]) -> list[bytes]:
        """The stored frames of taken ids, in their order; one that begins with `GIVEN_UP` is of a ticket that is dead."""
        ...

    def reject_frame(self, take: Take, ticket_id: int, frame: bytes, reason: str, *, final: bool = False) -> Take:
        """Move a frame that nobody can use to the dead letters and issue its id again; returns the shortened take.

        Does nothing to another frame of that id: one that came after the store had lost this one.

        It counts as a failed attempt of the ticket. After the last one `GIVEN_UP` and the reason stay in its place and the take
        stays whole: the learner counts the ticket as dead and goes on. So it is at once when it is `final`, and when other
        takes follow: a store that has lost a refusal, but not what came after it, brings the frame back when the take is made
        again.
        """
        ...

    def commit(self, number: int, chain: str) -> int:
        """Forget all groups of takes up to `number`; only after a checkpoint holds them. Returns how many."""
        ...

    def set_version(self, version: int, *, limit: int, waiting: bool = False) -> None:
        """Announce the version being trained and the highest id that may be issued; both only grow.

        `waiting`: the learner waits for groups of another buffer, and generators that keep groups of this one serve none:
        over the byte cap the oldest unfinished group is let in, as after a take in vain, until the next take.
        """
        ...

    def revoke(self, holder: str) -> int:
        """Issue again at once everything that a dead generator held; a death for each of its tickets. Returns how many."""
        ...

    def dead_letters(self) -> list[DeadLetter]:
        """What was set aside or refused, the newest first; bounded."""
        ...

    def close(self) -> None:
        """Tell the generators that the run is over."""
        ...

    def audit(self) -> Audit:
        """Count every id once."""
        ...


class Buffer(GeneratorBuffer, LearnerBuffer, Protocol):
    """Both sides: what the implementations provide and the contract test drives."""
