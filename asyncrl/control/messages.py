"""The control plane's messages on the wire, the options of the sockets that carry them, and what is said of bad ones."""

import logging
import time
from dataclasses import dataclass

import zmq

from asyncrl.control.base import Heartbeat, Hello, Leave, Refused, Stop, Welcome
from asyncrl.errors import WireError
from asyncrl.weights.base import UpdateOrder, UpdateReport
from asyncrl.wire.codec import HEADER_BYTES
from asyncrl.wire.typed_messages import MESSAGE_LIMITS, MessageCodec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnknownMember:
    """learner -> generator: your heartbeat is nobody's I know; say hello. (The learner restarted, or counted you dead.)"""


CODEC = MessageCodec((Hello, Heartbeat, Leave, UpdateReport, Welcome, Refused, UnknownMember, Stop, UpdateOrder))

# What a generator accepts: orders carry the layout of the model, about 75 bytes per tensor.
MAX_ORDER_BYTES = HEADER_BYTES + MESSAGE_LIMITS.meta_bytes
# What the learner accepts, from each of many: what generators say takes a few KiB.
MAX_REPORT_BYTES = 1 << 15
# Of a report: longer ones are cut off before they are sent.
MAX_REASON_CHARACTERS = 4000
_QUEUED_MESSAGES = 64
_HANDSHAKE_MS = 5_000
_COMPLAINTS_EVERY_S = 1.0


class Complaints:
    """Messages that were rejected: each is counted, one a second is told."""

    def __init__(self) -> None:
        self.count = self._told = 0
        self._told_at_s = -_COMPLAINTS_EVERY_S

    def add(self, error: Exception) -> None:
        """One more, and why."""
        self.count += 1
        if time.monotonic() - self._told_at_s < _COMPLAINTS_EVERY_S:
            return
        log.warning(
            "control plane: a message was rejected (the %d. since the last such line): %s",
            *(self.count - self._told, error),
            exc_info=None if isinstance(error, WireError | TypeError) else error,
        )
        self._told, self._told_at_s = self.count, time.monotonic()


def set_options(socket: "zmq.Socket[bytes]", *, max_bytes: int) -> None:
    """What both ends need: nothing is queued for the dead, nothing larger than `max_bytes` comes in, closing never hangs."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)  # whoever connects and says nothing is dropped
    # Drops the connection of a stopped peer, so that sending to it fails instead of queueing.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
