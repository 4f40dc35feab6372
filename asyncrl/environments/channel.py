"""The generator's end of the socket of an environment's process."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

from asyncrl.environments.json_frames import packed, take_frames
from asyncrl.errors import EnvironmentFault


class Channel(asyncio.Protocol):
    """Sends and receives messages; those of one turn of the loop leave together."""

    def __init__(self, receive: Callable[[dict[str, Any]], None], lose: Callable[[str], None]) -> None:
        """`receive` gets each message. `lose` is called once with "" at the end, or with what was wrong."""
        self._receive, self._lose = receive, lose
        self._arrived = bytearray()
        self._leaving: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Pass on the messages that are whole."""
        self._arrived += data
        try:
            for message in take_frames(self._arrived):
                self._receive(message)
        except (ValueError, LookupError, TypeError) as error:  # user code wrote to the socket
            self._end(f"sent bytes that are no message ({type(error).__name__}: {error})")

    def connection_lost(self, error: Exception | None) -> None:
        """Report the end of the process."""
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
