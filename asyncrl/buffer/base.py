"""The distributed buffer: the interfaces for generators and for the learner.

Every call is idempotent: after a lost reply the caller repeats the call. docs/planes/buffer.md explains why
no group is lost or trained twice. `memory.py` is the shortest complete implementation.

Life of a ticket id:   issued -> leased -> ready -> taken -> done
                                  |  ^
                                  v  |        lease expired, given back, failed, rejected
                                reissue

A *take* is a numbered, hash-chained assignment of ready groups to the learner. A step needs one take, or
more if filters reject groups and the step is refilled.
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
    """Tickets leased to one generator."""

    tickets: tuple[Ticket, ...]
    closed: bool  # the run is over: the generator must stop leasing and leave


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRules:
    """Settings that all handles on one lane share."""

    # B of the staleness bound; for the evaluation lane the number of prompts of one evaluation.
    groups: int
    lease_s: float = 60.0
    max_attempts: int = 3
    # Holders that may die, or lose their lease, while they have a ticket. The last `ALONE_DEATHS` of them
    # hold no other ticket of the lane, which separates the culprit from tickets held at the same time.
    max_deaths: int = 5
    # Upper bound on stored frames. Above it, a group is accepted only while the learner is starved, and then
    # only the oldest unfinished group, or any group if no generator holds the oldest.
    max_bytes: int = 4 << 30


# Prefix of the reason that replaces the frame of a ticket that was given up. No frame begins with it.
GIVEN_UP = b"given up: "
ALONE_DEATHS = 2
# The number of dead letters that are kept.
DEAD_LETTERS = 100
# The kind of groups that were set aside because processes died while they had them.
DEADLY = "deadly"


def one_line(reason: str) -> str:
    """The reason as it is stored: on one line, and cut off after 1000 characters."""
    return " ".join(reason.split())[:1000]


def kind_of(reason: str) -> str:
    """The kind under which a reason is counted: the text before its first colon."""
    return reason.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A group that was set aside, or a frame that was rejected."""

    id: int
    reason: str


class PutOutcome(StrEnum):
    """The result of an attempt to store a group."""

    STORED = "stored"
    # Already stored, taken or done: the generator drops the group.
    DUPLICATE = "duplicate"
    # Above the byte cap: the generator keeps the group, leases nothing, and tries again.
    FULL = "full"
    # Not issued, after a rollback of the store: the generator drops the group; the id will be issued again.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Groups assigned to the learner under `number`; `chain` is the hash after it."""

    number: int
    ids: tuple[int, ...]
    chain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The number of ids in each place; `issued` is the sum of the other places."""

    issued: int
    leased: int
    reissue: int
    ready: int
    taken: int
    done: int
    payload_bytes: int
    # Keys: put, duplicate, unknown, full, lease_expired, failed, dead, deaths, rejected_frames, returned.
    counters: dict[str, int]

    @property
    def missing(self) -> int:
        """The number of ids that are in no place (> 0) or in two places (< 0); 0 in a correct buffer."""
        return self.issued - self.leased - self.reissue - self.ready - self.taken - self.done


class GeneratorBuffer(Protocol):
    """The generators' side of a buffer."""

    def lease(self, holder: str, count: int) -> Lease:
        """Lease up to `count` tickets under the credit limit: those to be issued again first, then new ones.

        An expired lease counts as a death of the ticket's holder. A ticket with `max_deaths` - `ALONE_DEATHS`
        deaths is a suspect and is leased alone, to a holder without other tickets. While a suspect waits, a
        holder that has tickets leases nothing more. After `max_deaths` the next take gives the ticket up, and
        the reason replaces its frame.
        """

    def renew(self, holder: str, ids: Iterable[int]) -> None:
        """Extend the leases of `ids` by the lease time; ids that `holder` no longer holds are ignored."""

    def put(self, holder: str, ticket_id: int, frame: bytes) -> PutOutcome:
        """Store a whole group."""

    def give_back(self, holder: str, ids: Iterable[int]) -> None:
        """Return unused tickets; this does not count as a failure."""

    def fail(self, holder: str, ticket_id: int, reason: str, tombstone: bytes) -> bool:
        """Return a ticket whose sampling or reward failed; True if that was its last attempt.

        After the last attempt the learner gets `tombstone`, an encoded dead `Group`, in place of the group.
        """


class LearnerBuffer(Protocol):
    """The learner's side of a buffer. Its methods raise BufferFenced and BufferGap."""

    def recover(self, ledger: Ledger, *, version: int, limit: int, history: History = INITIAL) -> None:
        """Fence older learners and make the store agree with `ledger`; reopens a closed lane.

        Tickets carry `history` from now on. Raises BufferFenced if a newer learner has recovered.

        After BufferGap a running learner may recover with the ledger in its memory. If it dies before the
        next checkpoint, the recovery from the checkpoint issues again the ids that only this ledger had.
        """

    def take(self, ledger: Ledger, count: int, *, window: int) -> Take | None:
        """Assign the next `count` groups by the anchored window, all or none; None if not enough are ready.

        The take follows those in `ledger`; the caller enters it there. A repeated call returns the same ids.
        """

    def frames(self, ids: Sequence[int]) -> list[bytes]:
        """Return the stored frames of taken ids, in their order; one that begins with `GIVEN_UP` is dead."""

    def reject_frame(
        self, take: Take, ticket_id: int, frame: bytes, reason: str, *, final: bool = False, old: bool = False
    ) -> Take:
        """Move an unusable frame to the dead letters and issue its id again; returns the shortened take.

        Does nothing if the id has another frame, which was stored after a rollback had lost this one.

        The rejection counts as a failed attempt. After the last attempt, or if `final`, the ticket is dead:
        `GIVEN_UP` and the reason replace the frame, and the take stays whole. The same happens if later takes
        exist, because after a rollback a repeated take could otherwise return the rejected frame. One of
        `old` weights, which the learner lost, costs no attempt, and undoes later takes.
        """

    def commit(self, number: int, chain: str) -> int:
        """Delete the groups of takes up to `number`, which a checkpoint must contain. Returns the count."""

    def set_version(self, version: int, *, limit: int, waiting: bool = False) -> None:
        """Announce the version being trained and the highest id that may be issued; both only grow.

        `waiting`: the learner waits for another shard. Until the next take, accept the oldest unfinished
        group despite the byte cap: a generator that keeps a group for a full shard leases from no shard.
        """

    def revoke(self, holder: str) -> int:
        """Issue all tickets of a dead generator again and count a death for each. Returns their number."""

    def dead_letters(self) -> list[DeadLetter]:
        """Return the newest `DEAD_LETTERS` groups that were set aside or rejected, newest first."""

    def close(self) -> None:
        """Tell the generators that the run is over."""

    def audit(self) -> Audit:
        """Count every id once."""


class Buffer(GeneratorBuffer, LearnerBuffer, Protocol):
    """Both sides of a buffer; the contract test runs every implementation."""
