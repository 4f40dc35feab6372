"""Messages between a generator and an environment's processes: JSON behind its length (4 bytes).

Like all that these processes import, it needs nothing but the standard library.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, cast

from asyncrl.errors import EnvironmentFault

LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 16 * 2**20


def packed(message: Mapping[str, Any], *, default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a message as bytes; `default` converts what is neither text, number, list nor dict.

    Half of a surrogate pair becomes a question mark. Raises TypeError for what `default` does not convert,
    and ValueError if the message is too long.
    """
    data = json.dumps(message, default=default or _plain, ensure_ascii=False).encode("utf-8", "replace")
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"found {len(data):,} bytes; at most {MAX_MESSAGE_BYTES:,} are allowed")
    return LENGTH.pack(len(data)) + data


def take_frames(arrived: bytearray) -> list[dict[str, Any]]:
    """Remove and return all messages that are whole. Raises ValueError for bytes that are no messages."""
    messages, start = [], 0
    while len(arrived) >= start + LENGTH.size:
        (length,) = LENGTH.unpack_from(arrived, start)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length:,} bytes")
        end = start + LENGTH.size + length
        if len(arrived) < end:
            break
        message = json.loads(arrived[start + LENGTH.size : end])
        if not isinstance(message, dict):
            raise ValueError(f"a message of type {type(message).__name__}")
        messages.append(message)
        start = end
    del arrived[:start]
    return messages


def read_frame(stream: BinaryIO) -> dict[str, Any]:
    """Wait for the next message. Raises EOFError."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    message: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(header)[0]))
    return message


def receive_order(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for the next message and the descriptors that come with it. Raises EOFError."""
    header, descriptors, _, _ = socket.recv_fds(channel, LENGTH.size, 1)
    if len(header) < LENGTH.size:
        raise EOFError
    return json.loads(channel.recv(LENGTH.unpack(header)[0], socket.MSG_WAITALL)), descriptors


class Channel(asyncio.Protocol):
    """The generator's end of a socket. Messages of one turn of the loop leave together."""

    def __init__(self, receive: Callable[[dict[str, Any]], None], lose: Callable[[str], None]) -> None:
        """`receive` gets each message. `lose` is called once with "" at the end, or with what was wrong."""
        self._receive, self._lose = receive, lose
        self._arrived = bytearray()
        self._leaving: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        try:
            for message in take_frames(self._arrived):
                self._receive(message)
        except (ValueError, LookupError, TypeError) as error:  # user code wrote to the socket
            self._end(f"sent bytes that are no message ({type(error).__name__}: {error})")

    def connection_lost(self, error: Exception | None) -> None:
        self._end("")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message soon; dates and the like become text. Raises EnvironmentFault if it is too long."""
        try:
            frame = packed(message, default=str)
        except (TypeError, ValueError) as error:  # keys that are not text, or nested without end
            raise EnvironmentFault(f"cannot be sent to the environment: {error}", reason="start") from error
        if not self._leaving:
            asyncio.get_running_loop().call_soon(self._flush)
        self._leaving.append(frame)

    def close(self) -> None:
        """Close the socket; nothing is reported from now on."""
        self._lose = lambda reason: None
        if self._transport:
            self._transport.abort()

    def _flush(self) -> None:
        if self._transport:
            self._transport.write(b"".join(self._leaving))
        self._leaving.clear()

    def _end(self, reason: str) -> None:
        lose = self._lose
        self.close()
        lose(reason)


def as_text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON; what JSON lacks, such as a date, becomes text."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=_listed, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # keys that JSON lacks, such as numbers of NumPy
        return str(value)


def _listed(value: Any) -> Any:
    # As numbers, dates of NumPy lose their unit; a list of a Series of pandas lacks its index.
    is_text = hasattr(value, "to_dict") or getattr(getattr(value, "dtype", None), "kind", None) in ("m", "M")
    return str(value) if is_text or not hasattr(value, "tolist") else value.tolist()


def _plain(value: Any) -> Any:
    """A number of NumPy or torch as Python's."""
    if callable(getattr(value, "item", None)) and not getattr(value, "shape", ()):
        return value.item()
    raise TypeError(f"returned a value of type {type(value).__name__}, which is neither text nor number")
