"""Decodes and checks taken frames: the learner gets groups that can be trained on, or dead groups."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.algo.trainable import MOST_CHARACTERS, UNTRAINABLE, GroupLimits, trainable
from asyncrl.buffer.base import DEADLY, GIVEN_UP, LearnerBuffer, Take, kind_of
from asyncrl.errors import WireError
from asyncrl.hosting.progress import beat
from asyncrl.types import Group

log = logging.getLogger(__name__)

# The kind of groups whose ticket failed too often.
DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The checks of one lane."""

    # Frames of other lanes are rejected, because lanes use the same ticket ids.
    lane: str
    decode: Callable[[bytes], Group]
    limits: GroupLimits
    # Returns a reason if learners died while they trained on this frame; then the frame is not decoded.
    condemned: Callable[[bytes], str | None] = lambda frame: None
    # Returns the ticket's id outside the buffer, which the frame carries: a shard has ids of its own.
    name_of: Callable[[int], int] = lambda ticket_id: ticket_id

    def groups(self, buffer: LearnerBuffer, take: Take) -> list[tuple[Group, bytes]] | None:
        """Return the groups of a take with their frames, or None after a frame that cannot be decoded.

        The gate rejects such a frame; the caller takes again and gets the rest of the take. A group that
        cannot be trained on is returned dead; its `dead_reason` begins with dead, untrainable or deadly.
        """
        groups: list[tuple[Group, bytes]] = []
        for ticket_id, frame in zip(take.ids, buffer.frames(take.ids), strict=True):
            beat()
            name = self.name_of(ticket_id)
            where = {"ticket_id": name, "lane": self.lane}
            try:
                groups.append((self._group(name, frame), frame))
            except WireError as error:
                invalid = "the frame of group %d is not valid and counts as a failed attempt: %s"
                log.error(invalid, name, error, extra=where)
                buffer.reject_frame(take, ticket_id, frame, f"{DEAD}: undecodable: {error}")
                return None
            except _SetAside as verdict:
                reason = str(verdict)
                log.error("group %d is set aside: %s", name, reason, extra=where)
                buffer.reject_frame(take, ticket_id, frame, reason, final=True)
                groups.append((_dead(name, reason), frame))
        return groups

    def _group(self, name: int, frame: bytes) -> Group:
        """Return the group of a frame. Raises WireError, or _SetAside to give the ticket up."""
        if frame.startswith(GIVEN_UP):
            given = frame.removeprefix(GIVEN_UP)[:4000].decode(errors="replace")
            # A generator can write this text, and its kind becomes the name of a metric.
            return _dead(name, given if kind_of(given) in (DEAD, UNTRAINABLE, DEADLY) else f"{DEAD}: {given}")
        if reason := self.condemned(frame):
            raise _SetAside(f"{DEADLY}: {reason}")
        group = self.decode(frame)
        if (group.lane, group.ticket_id) != (self.lane, name):
            raise WireError(
                f"stored in lane {self.lane} under id {name}, but its group says lane {group.lane[:40]!r}, "
                f"id {group.ticket_id}"
            )
        if group.dead_reason is not None:
            return _dead(name, f"{DEAD}: {group.dead_reason}", generator_id=group.generator_id)
        if reason := trainable(group, self.limits):
            raise _SetAside(f"{UNTRAINABLE}: {reason}")
        return group


class _SetAside(Exception):
    """The text is the reason to set a group aside."""


def _dead(ticket_id: int, reason: str, *, generator_id: str = "") -> Group:
    return Group.dead(ticket_id, reason, generator_id=generator_id[:MOST_CHARACTERS], version=0)
