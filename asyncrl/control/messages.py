"""The control plane's messages on the wire, and the options of the sockets that carry them."""

from dataclasses import dataclass

import zmq

from asyncrl.control.base import Heartbeat, Hello, Leave, Refused, Stop, Welcome
from asyncrl.weights.base import UpdateOrder, UpdateReport
from asyncrl.wire.codec import HEADER_BYTES
from asyncrl.wire.messages import MESSAGE_LIMITS, MessageCodec


@dataclass(frozen=True, slots=True)
class UnknownMember:
    """learner -> generator: your heartbeat is nobody's I know; say hello. (The learner restarted, or counted you dead.)"""


CODEC = MessageCodec((Hello, Heartbeat, Leave, UpdateReport, Welcome, Refused, UnknownMember, Stop, UpdateOrder))

MAX_MESSAGE_BYTES = HEADER_BYTES + MESSAGE_LIMITS.meta_bytes
"""Orders carry the layout of the model, about 75 bytes per tensor; everything else is below 64 KiB."""


def set_options(socket: "zmq.Socket[bytes]") -> None:
    """What both ends need: nothing is queued for the dead, nothing large is accepted, closing never hangs."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 64)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # Drops the connection of a stopped peer, so that sending to it fails instead of queueing.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
