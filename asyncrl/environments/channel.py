"""The generator's end of the socket of an environment's process."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(slots=True, eq=False)
class Call:
    """A request, and the future of its reply."""

    request: Mapping[str, Any]
    reply: asyncio.Future[dict[str, Any]]


class Requests:
    """Requests to a worker that answers in order. The time limit of one starts when it is the oldest."""

    def __init__(self, limit_s: float, lost: Callable[[str, list[Call]], None]) -> None:
        """`lost` is called once with a reason, `hung` or `died` with details, and what is not answered."""
        self._limit_s, self._lost = limit_s, lost
        self.channel = Channel(self._answered, lambda wrong: self._lose(wrong or "died"))
        self._open: deque[Call] = deque()
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return the number of requests that are not answered."""
        return len(self._open)

    def submit(self, call: Call) -> None:
        """Send a request behind those that are open. Raises EnvironmentFault if it cannot be sent."""
        self.channel.send(call.request)
        self._open.append(call)
        if len(self._open) == 1:
            loop = asyncio.get_running_loop()
            self._since_s = loop.time()
            if self._timer is None:  # one timer for all requests: it looks again when the oldest is due
                self._timer = loop.call_later(self._limit_s, self._look)

    def close(self) -> list[Call]:
        """Close the channel, and return what is not answered."""
        self.channel.close()
        left = list(self._open)
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return left

    def _answered(self, message: dict[str, Any]) -> None:
        call = self._open.popleft()  # IndexError: nothing was asked
        self._since_s = asyncio.get_running_loop().time()
        if not isinstance(message["seconds"], float) or not message.keys() & {"value", "error"}:
            raise ValueError("a reply without a value or its time")
        if not call.reply.done():
            call.reply.set_result(message)

    def _look(self) -> None:
        self._timer, loop = None, asyncio.get_running_loop()
        left_s = self._since_s + self._limit_s - loop.time()
        if self._open and left_s <= 0:
            self._lose("hung")
        elif self._open:
            self._timer = loop.call_later(left_s, self._look)

    def _lose(self, reason: str) -> None:
        self._lost(reason, self.close())
