"""Between the store and everything that digests a group: what was taken comes out as a group that is safe, or as a dead one."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.algo.trainable import MOST_CHARACTERS, UNTRAINABLE, GroupLimits, trainable
from asyncrl.buffer.base import DEADLY, GIVEN_UP, LearnerBuffer, Take, kind_of
from asyncrl.errors import WireError
from asyncrl.progress import beat
from asyncrl.types import Group

log = logging.getLogger(__name__)

# What the reason of a group begins with whose ticket failed too often.
DEAD = "dead"
# Bytes of a reason that is read from the store.
MOST_REASON = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One lane's."""

    # A frame of another lane is none of this one, though the number of its ticket may be the same.
    lane: str
    decode: Callable[[bytes], Group]
    limits: GroupLimits
    # Why a frame is set aside whatever it holds; None for others. Learners died while they trained on it.
    condemned: Callable[[bytes], str | None] = lambda frame: None

    def name_of(self, ticket_id: int) -> int:
        """The id that stands in the frame, and by which everybody else knows the ticket that the buffer calls `ticket_id`."""
        return ticket_id

    def groups(self, buffer: LearnerBuffer, take: Take) -> list[Group] | None:
        """The groups of a take; None after a frame that is not ours was sent back.

        Its id is issued again while it has attempts left, and the rest stays assigned to the same take: the caller asks for
        it again. What nobody may digest comes as a dead group without rollouts; its `dead_reason` begins with how it is
        counted: dead, untrainable, deadly.
        """
        groups: list[Group] = []
        for ticket_id, frame in zip(take.ids, buffer.frames(take.ids), strict=True):
            beat()
            name = self.name_of(ticket_id)
            try:
                groups.append(self._group(name, frame))
            except WireError as error:
                where = {"ticket_id": name, "lane": self.lane}
                log.error("group %d is not a frame of ours and counts as a failed attempt: %s", name, error, extra=where)
                buffer.reject_frame(take, ticket_id, frame, f"{DEAD}: undecodable: {error}")
                return None
            except _SetAside as verdict:
                reason = str(verdict)
                log.error("group %d is set aside: %s", name, reason, extra={"ticket_id": name, "lane": self.lane})
                buffer.reject_frame(take, ticket_id, frame, reason, final=True)
                groups.append(_dead(name, reason))
        return groups

    def _group(self, name: int, frame: bytes) -> Group:
        """Raises WireError, and _SetAside where no other attempt is to be made."""
        if frame.startswith(GIVEN_UP):
            return _dead(name, _known(frame.removeprefix(GIVEN_UP)[:MOST_REASON].decode(errors="replace")))
        if reason := self.condemned(frame):
            raise _SetAside(f"{DEADLY}: {reason}")
        group = self.decode(frame)
        if (group.lane, group.ticket_id) != (self.lane, name):
            raise WireError(
                f"stored in lane {self.lane} under id {name}, but its group says lane {group.lane[:40]!r}, id {group.ticket_id}"
            )
        if group.dead_reason is not None:
            return _dead(name, f"{DEAD}: {group.dead_reason}", generator_id=group.generator_id)
        if reason := trainable(group, self.limits):
            raise _SetAside(f"{UNTRAINABLE}: {reason}")
        return group


def _known(reason: str) -> str:
    """Whoever may store frames may write this one, and what it is counted as becomes the name of a metric."""
    return reason if kind_of(reason) in (DEAD, UNTRAINABLE, DEADLY) else f"{DEAD}: {reason}"


class _SetAside(Exception):  # not an error: what is not digested, and why
    pass


def _dead(ticket_id: int, reason: str, *, generator_id: str = "") -> Group:
    return Group.dead(ticket_id, reason, generator_id=generator_id[:MOST_CHARACTERS], version=0)
