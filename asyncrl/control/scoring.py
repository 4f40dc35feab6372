"""Calls of scorers: token ids go to a process of the run on this host, which answers with a number.

Each scorer listens on a private socket file. A client connects to all of one name, and any of them answers:
messages go only to scorers that are connected. A call that a dying scorer has taken gets no answer; the
caller asks again, which is harmless, because a score depends on the ids only.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgpack
import zmq
import zmq.asyncio

from asyncrl.control.listening import listen
from asyncrl.control.messages import set_options
from asyncrl.errors import EngineError

MAX_CALL_BYTES = 1 << 24


def endpoint_of(directory: Path, name: str, index: int) -> str:
    """Return where a scorer of the run listens."""
    return f"ipc://{directory.absolute()}/{name}.{index}.sock"


class ScorerClient:
    """Asks the scorers of one name."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._context: Any = zmq.asyncio.Context()
        self._socket = cast(Any, self._context.socket(zmq.DEALER))
        set_options(self._socket, max_bytes=MAX_CALL_BYTES)
        # Without it, calls would queue for scorers that do not run.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        for endpoint in endpoints:
            self._socket.connect(endpoint)
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def ask(self, token_ids: Sequence[int]) -> Any:
        """Return the score, or raise EngineError if a scorer refuses. Waits without limit."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        number = next(self._numbers).to_bytes(8)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._socket.send_multipart([number, msgpack.packb(list(token_ids))])
            return await answer
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        while True:
            number, data = await self._socket.recv_multipart()
            answer, (score, error) = self._waiting.get(number), msgpack.unpackb(data)
            if answer is not None and not answer.done():
                answer.set_exception(EngineError(error)) if error else answer.set_result(score)

    async def close(self) -> None:
        """Drop the calls."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        self._context.destroy(linger=0)


async def serve_scores(endpoint: str, score: Callable[[list[int]], Awaitable[float]]) -> None:
    """Answer calls until cancelled. Raises ControlError for an endpoint that cannot be used."""
    context: Any = zmq.asyncio.Context()
    router: Any
    router, _ = listen(context, endpoint, None)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_CALL_BYTES)

    async def answer(peer: bytes, number: bytes, data: bytes) -> None:
        try:
            reply: list[Any] = [await score(msgpack.unpackb(data)), None]
        except EngineError as error:
            reply = [None, str(error)]
        with contextlib.suppress(zmq.ZMQError):  # the caller is gone
            await router.send_multipart([peer, number, msgpack.packb(reply)])

    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(answer(*await router.recv_multipart()))
    finally:
        context.destroy(linger=0)
