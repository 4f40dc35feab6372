"""A proxy in front of a unix socket that swallows replies, repeats requests late, and falls silent."""

import asyncio
import contextlib
import random
import threading
from pathlib import Path
from typing import Any

LATE_S = 3.0
"""A repeated request arrives up to this much later."""


class Proxy:
    """Runs in a thread of its own. Rates are per piece of data, in this world one request or reply."""

    def __init__(self, upstream: Path, *, seed: int, listen: Path | None = None) -> None:
        """It listens on the unix socket `listen`, or else on a free port of the loopback interface."""
        self.swallow_rate = 0.0
        """Replies: the server has obeyed, but the client never hears of it and loses its connection."""
        self.repeat_rate = 0.0
        """Of requests: the same bytes reach the server once more, on a connection of their own."""
        self.swallowed = 0
        self.repeated = 0
        self.upstream = upstream
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(self._listen(listen))
        name = self._server.sockets[0].getsockname()
        self.address = str(listen) if listen else f"{name[0]}:{name[1]}"

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10.0)

    def cut(self) -> None:
        """Let nothing pass in either direction; what is sent waits, as TCP repeats it after the partition."""
        self._loop.call_soon_threadsafe(self._is_open.clear)

    def heal(self) -> None:
        """Let everything pass."""
        self._loop.call_soon_threadsafe(self._is_open.set)

    def close(self) -> None:
        """Drop everything."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    async def _listen(self, path: Path | None) -> asyncio.Server:
        if path is None:
            return await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return await asyncio.start_unix_server(self._serve, path)

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._is_open.wait()
            try:
                server_reader, server_writer = await asyncio.open_unix_connection(str(self.upstream))
            except OSError:
                writer.transport.abort()
                return
            pumps = [
                asyncio.create_task(self._requests(reader, server_writer)),
                asyncio.create_task(self._replies(server_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                server_writer.transport.abort()
                writer.transport.abort()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 20):
            await self._is_open.wait()
            writer.write(data)
            await writer.drain()
            if self.repeat_rate and self._random.random() < self.repeat_rate and is_whole(data):
                task = asyncio.create_task(self._repeat(data, self._random.uniform(0.0, LATE_S)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 20):
            await self._is_open.wait()
            if self._random.random() < self.swallow_rate:
                self.swallowed += 1
                return
            writer.write(data)
            await writer.drain()

    async def _repeat(self, data: bytes, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_unix_connection(str(self.upstream))
            writer.write(data)
            await asyncio.wait_for(reader.read(1), 5.0)
            writer.transport.abort()
            self.repeated += 1


def is_whole(data: bytes) -> bool:
    """Whether `data` is one or more whole requests of the Redis protocol."""
    at = 0
    while at < len(data):
        if data[at : at + 1] != b"*" or (end := data.find(b"\r\n", at)) < 0:
            return False
        count, at = int(data[at + 1 : end]), end + 2
        for _ in range(count):
            if data[at : at + 1] != b"$" or (end := data.find(b"\r\n", at)) < 0:
                return False
            at = end + 2 + int(data[at + 1 : end]) + 2
    return at == len(data)
