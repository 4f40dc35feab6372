"""Weights over TCP: the learner serves its slots, and a generator fetches one into its own memory.

    learner    server = SlotServer(host, find, size_bytes, ...); server.source(stamp) goes into the order
    generator  fetch(source, buffer, layout, checksums, until_s=...)

    generator -> learner   key (32 bytes), stamp (8 bytes)
    learner -> generator   size (8 bytes; 0 if no slot holds that publication), then the slot's bytes

A connection serves one request and ends. One thread serves all of them, however many there are: the kernel
sends a slot's memory by itself. With `GROUP` in place of a stamp, the connection is handed to a process, see
asyncrl/weights/nccl.py, of which there are as many as members that get their weights so. The key, drawn for
each start of the learner, keeps strangers out; nothing is encrypted. The checksums of the order tell whether
the bytes are the learner's.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from asyncrl.errors import TransferError
from asyncrl.hosting.workers import Worker
from asyncrl.weights.layout import Layout, verify

log = logging.getLogger(__name__)

_REQUEST = struct.Struct("<32sQ")
_SIZE = struct.Struct("<Q")
# In place of a stamp: the connection of a host that receives over NCCL.
GROUP = 2**64 - 1
# A host that has lost its power is noticed after about ten minutes.
_IDLE_S = 60
_LOOK_S = 1.0
_BACKLOG = 1024
# Connections without a request. One more closes the oldest of them.
_MOST_STRANGERS = 256
# Bound on one call of the kernel, so that no reader keeps the thread from the others.
_PIECE_BYTES = 8 << 20
# Pause after a connection that could not be accepted.
_FULL_S = 0.2
_END_S = 5.0


class SlotServer:
    """Serves whole slots from one thread."""

    def __init__(
        self,
        host: str,
        find: Callable[[int], int],
        size_bytes: int,
        *,
        deadline_s: float,
        start: Callable[[socket.socket], Worker] | None = None,
    ) -> None:
        """Listen on one address of this host. Raises OSError.

        Args:
            host: the address; IPv6 without brackets.
            find: returns the open file of a publication's slot, or -1.
            size_bytes: the size of every slot.
            deadline_s: a connection that lasts longer is closed, unless a process has it.
            start: starts the process for a connection that asks for a group, up to `most_handed`, which is 0
                at first; a further connection ends one that was closed, or else the oldest one.
        """
        self._find, self._size_bytes, self._deadline_s = find, size_bytes, deadline_s
        self._start = start
        # Most connections with a process, of which each takes memory of the learner's host and GPU.
        self.most_handed = 0
        self._handed: dict[asyncio.Task[None], select.poll] = {}
        self._key = secrets.token_bytes(32)
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._host, self._port = host, self._listener.getsockname()[1]
        # Open connections; with a task, those that have not presented the key yet, the oldest one first.
        self._readers: dict[socket.socket, asyncio.Task[None] | None] = {}
        self._loop = asyncio.SelectorEventLoop()
        self._serving = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name="asyncrl-weights-tcp", daemon=True)
        self._thread.start()

    def source(self, stamp: int) -> dict[str, Any]:
        """Plain values with which `fetch` gets the publication `stamp`; secret, as they hold the key."""
        return {"host": self._host, "port": self._port, "key": self._key, "stamp": stamp}

    def close(self) -> None:
        """End the thread and all connections."""
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            with contextlib.closing(self._loop), self._listener:
                self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("no weights are served over TCP any more; restart the learner")

    async def _accept(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    channel, _ = await self._loop.sock_accept(self._listener)
                except OSError as error:  # for example, too many open files
                    log.warning("a connection for weights is not accepted yet: %s", error)
                    await asyncio.sleep(_FULL_S)
                    continue
                strangers = [task for task in self._readers.values() if task]
                if len(strangers) >= _MOST_STRANGERS:
                    strangers[0].cancel()
                self._readers[channel] = tasks.create_task(self._serve(channel))
                await asyncio.sleep(0)  # starts the task, and lets others run while connections wait

    async def _serve(self, channel: socket.socket) -> None:
        """Answer the request of a connection, and close it."""
        request = b""
        try:
            async with asyncio.timeout(self._deadline_s):
                while len(request) < _REQUEST.size:
                    piece = await self._loop.sock_recv(channel, _REQUEST.size - len(request))
                    if not piece:
                        return
                    request += piece
                key, stamp = _REQUEST.unpack(request)
                if not hmac.compare_digest(key, self._key):
                    log.warning("weights are asked for with a wrong key from %s", channel.getpeername())
                    return
                self._readers[channel] = None
                if stamp != GROUP:
                    await self._send(channel, self._find(stamp))
            if stamp == GROUP and self._start and self.most_handed:
                await self._hand_over(channel, self._start)
        except (OSError, asyncio.SendfileNotAvailableError):
            pass  # the other side has gone, or its time is over
        finally:
            del self._readers[channel]
            channel.close()

    async def _hand_over(self, channel: socket.socket, start: Callable[[socket.socket], Worker]) -> None:
        """Let a process serve a connection until one of them ends; the process may hang in its group."""
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        channel.setblocking(True)
        task = asyncio.current_task()
        assert task is not None
        closed = select.poll()
        closed.register(channel, select.POLLRDHUP)
        self._handed[task] = closed
        # Connections whose other end has gone come first: their hosts may have connected again.
        ordered = sorted(self._handed, key=lambda one: not self._handed[one].poll(0))
        for oldest in ordered[: -self.most_handed]:
            oldest.cancel()
        worker = None
        try:
            worker = start(channel)
            while worker.is_running and not closed.poll(0):
                await asyncio.sleep(_LOOK_S)
        except OSError as error:
            log.warning("the process that sends weights to a host does not start: %s", error)
        finally:
            del self._handed[task]
            if worker is not None:
                worker.end()

    async def _send(self, channel: socket.socket, file: int) -> None:
        size_bytes = self._size_bytes if file >= 0 else 0
        await self._loop.sock_sendall(channel, _SIZE.pack(size_bytes))
        if size_bytes:
            with open(file, "rb", buffering=0, closefd=False) as slot:
                for start in range(0, size_bytes, _PIECE_BYTES):
                    count = min(_PIECE_BYTES, size_bytes - start)
                    await self._loop.sock_sendfile(channel, slot, start, count, fallback=False)


def fetch(
    source: Mapping[str, Any],
    buffer: Tensor,
    layout: Layout,
    checksums: Sequence[int],
    *,
    until_s: float,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Fill `buffer` (uint8, [layout.total_bytes], on the host) from a server, and verify every tensor.

    Args:
        source: what the server said, see `SlotServer.source`.
        until_s: the time.monotonic() at which it must be done.
        on_progress: called whenever bytes have arrived.

    Raises:
        TransferError: it is late, the learner cannot be reached or has no such version, or a checksum
            differs; `buffer` is incomplete then.
    """
    memory, arrived = buffer.numpy().data, 0
    try:
        with connect(source, source.get("stamp"), until_s) as channel:
            _require_size(channel, layout.total_bytes, until_s)
            for index, end in enumerate(layout.offsets[1:]):
                while arrived < end:
                    channel.settimeout(left_s(until_s))
                    if not (count := channel.recv_into(memory[arrived:])):
                        raise ConnectionError("the learner closed the connection")
                    arrived += count
                    on_progress()
                verify(buffer, layout, checksums, index)
    except OSError as error:  # TimeoutError is one, too
        where = f"{source['host']}:{source['port']}: {arrived:,} of {layout.total_bytes:,} bytes arrived"
        raise TransferError(
            f"weights over tcp from {where} ({error}); the next order brings them again. If it repeats, "
            "check that this host reaches every port of that address, and raise weights.deadline_s if the "
            "network is slow"
        ) from error


def connect(source: Mapping[str, Any], stamp: Any, until_s: float) -> socket.socket:
    """Connect to a server, and send the request. Raises OSError; TransferError if `source` is malformed."""
    try:
        address = str(source["host"]), int(source["port"])
        request = _REQUEST.pack(bytes(source["key"]), int(stamp))
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise TransferError(f"weights: malformed order ({error!r})") from error
    channel = socket.create_connection(address, timeout=left_s(until_s))
    try:
        channel.sendall(request)
    except OSError:
        channel.close()
        raise
    return channel


def _require_size(channel: socket.socket, size_bytes: int, until_s: float) -> None:
    """Read the size that the server announces. Raises ConnectionError if it is another one."""
    header = bytearray()
    while len(header) < _SIZE.size:
        channel.settimeout(left_s(until_s))
        if not (piece := channel.recv(_SIZE.size - len(header))):
            raise ConnectionError("the learner closed the connection: it has another key, or has restarted")
        header += piece
    (announced,) = _SIZE.unpack(header)
    if announced != size_bytes:
        found = f"has {announced:,} bytes" if announced else "no longer has this version"
        raise ConnectionError(f"the learner {found}")


def left_s(until_s: float) -> float:
    """Seconds until then. Raises TimeoutError if there are none."""
    if (left_s := until_s - time.monotonic()) <= 0:
        raise TimeoutError("the deadline has passed")
    return left_s
