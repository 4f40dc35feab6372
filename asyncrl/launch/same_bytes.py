"""All ranks train on the same bytes: rank 0 takes groups from the store and hands out their frames."""

from collections.abc import Callable

from asyncrl.buffer.intake import Collected
from asyncrl.hosting.progress import beat
from asyncrl.types import Group

# Rank 0's words instead of the number of groups: the learner is asked to stop, or ends before its last step.
STOP, END = b"stop", b"end"
# Gives every rank the value of rank 0; every rank calls it.
Broadcast = Callable[[bytes | None], bytes]


def hand_out(
    broadcast: Broadcast,
    poll: Callable[[], Collected | None],
    *,
    ending: Callable[[], bytes],
    is_in_touch: Callable[[], bool],
) -> Collected | bytes:
    """Return a step's groups on rank 0, once the other ranks have their frames; or `STOP` or `END`.

    The other ranks do not ask the store, because its content may have changed a moment later.

    Args:
        broadcast: see `Broadcast`.
        poll: takes the groups of the step within about a second; None while they are not all there.
        ending: returns `STOP` or `END`, which every rank gets; empty while the training goes on.
        is_in_touch: whether the control plane makes progress; without it, this rank reports none either.
    """
    collected = None
    while collected is None:
        if end := ending():
            return broadcast(end)
        collected = poll()
        broadcast(b"%d" % len(collected.frames) if collected else b"")
        if is_in_touch():
            beat()
    for frame in collected.frames:
        broadcast(frame)
    return collected


def receive(broadcast: Broadcast, decode: Callable[[bytes], Group]) -> Collected | bytes:
    """Return a step's groups on the other ranks; or `STOP` or `END`.

    `decode` gets frames that rank 0 has decoded already; it checks the digest that each frame carries.
    """
    message = b""
    while not message:
        message = broadcast(None)
        beat()
    if message in (STOP, END):
        return message
    frames = [broadcast(None) for _ in range(int(message))]
    return Collected(groups=list(map(decode, frames)))
