"""All ranks of a learner train on the same bytes: rank 0 takes groups from the store and hands their frames
to the others."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.buffer.intake import Collected
from asyncrl.progress import beat
from asyncrl.types import Group

STOP = b"stop"
"""What rank 0 broadcasts instead of the number of groups when somebody has asked the learner to stop."""

Broadcast = Callable[[bytes | None], bytes]
"""Gives every rank the value of rank 0; every rank calls it."""


class Taken(NamedTuple):
    """The groups of one step, as rank 0 has taken them."""

    collected: Collected
    # One frame for each group, in the same order.
    frames: list[bytes]


def hand_out(
    broadcast: Broadcast,
    poll: Callable[[], Taken | None],
    *,
    is_asked_to_stop: Callable[[], bool],
    is_in_touch: Callable[[], bool],
) -> Collected | None:
    """Rank 0's half: the groups of a step, once the other ranks have their frames; None after `STOP`.

    The frames are handed on because the store may hold something else a moment later.

    Args:
        broadcast: see `Broadcast`. poll: takes the groups of the step; None while they are not all there. It
        returns after a second or so. is_asked_to_stop: then every rank hears `STOP` instead. is_in_touch:
        whether the control plane gets on; while it does not, this rank gives no sign of life.
    """
    taken = None
    while taken is None:
        if is_asked_to_stop():
            broadcast(STOP)
            return None
        taken = poll()
        broadcast(b"%d" % len(taken.frames) if taken else b"")
        if is_in_touch():
            beat()
    for frame in taken.frames:
        broadcast(frame)
    return taken.collected


def receive(broadcast: Broadcast, decode: Callable[[bytes], Group]) -> Collected | None:
    """The half of the other ranks: the groups that rank 0 hands out; None when it says `STOP`.

    Args:
        broadcast: see `Broadcast`.
        decode: for frames that rank 0 has decoded already. It checks the digest that each frame carries.
    """
    message = b""
    while not message:
        message = broadcast(None)
        beat()
    if message == STOP:
        return None
    frames = [broadcast(None) for _ in range(int(message))]
    return Collected(groups=tuple(decode(frame) for frame in frames), rejected=(), takes=0)


@dataclass(slots=True)
class DecodedFrames:
    """Decodes frames, and remembers until the end of the step which frame each group came from."""

    decoder: Callable[[bytes], Group]
    _decoded: list[tuple[Group, bytes]] = field(default_factory=list)

    def decode(self, frame: bytes) -> Group:
        """The group in the frame. Raises WireError."""
        group = self.decoder(frame)
        # Nothing is copied: the group's arrays are views of the frame.
        self._decoded.append((group, frame))
        return group

    def of_step(self, groups: Iterable[Group]) -> list[bytes]:
        """The frames of a step's groups; all other frames are forgotten."""
        # Looked up by object, not by ticket: a frame that was refused may name any ticket.
        frame_of = {id(group): frame for group, frame in self._decoded}
        self._decoded = []
        return [frame_of[id(group)] for group in groups]
