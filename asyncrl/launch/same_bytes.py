"""All ranks of a learner train on the same bytes: rank 0 takes groups, and hands their frames on."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.buffer.intake import Collected
from asyncrl.progress import beat
from asyncrl.types import Group

STOP = b"stop"


class Head(Protocol):
    """What only rank 0 has."""

    frames: list[bytes]
    """Of the groups that the last successful poll found."""

    @property
    def collected(self) -> Collected:
        """What the last successful poll found."""
        ...

    def is_in_touch(self) -> bool:
        """Whether the control plane has done something since the last call."""
        ...


def collect_on_every_rank(
    broadcast: Callable[[bytes | None], bytes], head: Head | None, poll: Callable[[], bytes], decode: Callable[[bytes], Group]
) -> Collected | None:
    """The groups of a step; None when rank 0 says `STOP`. What the store holds a moment later is nothing to the other ranks.

    Args:
        broadcast: gives every rank the value of rank 0.
        poll: of rank 0: how many groups there are, empty while they are not all there, or `STOP`.
        decode: for frames that rank 0 has decoded. It checks the digest that each of them carries.
    """
    message = b""
    while not message:
        message = broadcast(poll() if head else None)
        if head is None or head.is_in_touch():
            beat()
    if message == STOP:
        return None
    if head:
        for frame in head.frames:
            broadcast(frame)
        return head.collected
    frames = [broadcast(None) for _ in range(int(message))]
    return Collected(groups=tuple(decode(frame) for frame in frames), rejected=(), takes=0)


@dataclass(slots=True)
class DecodedFrames:
    """Decodes, and remembers until the next step which frame each group came from."""

    decoder: Callable[[bytes], Group]
    _decoded: list[tuple[Group, bytes]] = field(default_factory=list)

    def decode(self, frame: bytes) -> Group:
        """The group. Raises WireError."""
        group = self.decoder(frame)
        self._decoded.append((group, frame))  # no copy: the group's arrays are views of the frame
        return group

    def of_step(self, groups: Iterable[Group]) -> list[bytes]:
        """The frames of a step's groups; all others are forgotten."""
        frame_of = {id(group): frame for group, frame in self._decoded}  # not by ticket: a refused frame may say any
        self._decoded = []
        return [frame_of[id(group)] for group in groups]
