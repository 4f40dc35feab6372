"""The process that tries frames: `python -m asyncrl.wire.decoder_process <socket fd> <learner pid>`.

learner -> decoder   length | key              once;   <- an empty verdict: ready
                     length | frame                    <- length | verdict: why it is refused, or nothing
"""

import os
import resource
import socket
import struct
import sys

from asyncrl.errors import WireError
from asyncrl.processes import die_with_parent, receive_bytes
from asyncrl.unpickling import refuse_pickles_from_wires
from asyncrl.wire.group_frames import decode_group

LENGTH = struct.Struct("<Q")
OUT_OF_MEMORY = 77
"""Exit status."""
_SLACK_BYTES = 64 << 20


def memory_of(frame_bytes: int) -> int:
    """Bytes that trying a frame may take: it is held once, and decoding may make as much of it again, twice."""
    return 3 * frame_bytes + _SLACK_BYTES


def receive(channel: socket.socket) -> bytearray:
    """One message. Raises EOFError when the other side is gone."""
    (length,) = LENGTH.unpack(receive_bytes(channel, LENGTH.size))
    return receive_bytes(channel, length)


def _serve(channel: socket.socket) -> None:
    key = bytes(receive(channel))
    with open("/proc/self/statm") as statm:
        own_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    _answer(channel, "")
    while True:
        (length,) = LENGTH.unpack(receive_bytes(channel, LENGTH.size))
        resource.setrlimit(resource.RLIMIT_AS, (own_bytes + memory_of(length), hard))
        _answer(channel, _refusal(receive_bytes(channel, length), key))


def _refusal(frame: bytes | bytearray, key: bytes) -> str:
    try:
        decode_group(frame, key)
    except WireError as error:
        return str(error)
    return ""


def _answer(channel: socket.socket, verdict: str) -> None:
    text = verdict.encode(errors="replace")
    channel.sendall(LENGTH.pack(len(text)) + text)


def main() -> None:
    """Entry point of the process."""
    die_with_parent(int(sys.argv[2]))
    refuse_pickles_from_wires()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            _serve(channel)
        except (EOFError, ConnectionError):
            sys.exit()
        except MemoryError:  # where it happened the state is unknown; a fresh process is cheaper than trust
            os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
