"""Weights over TCP: the learner serves its slots, and a generator fetches one into its own memory.

    learner    server = SlotServer(host, find, size_bytes, stall_s); server.source(stamp) goes into the order
    generator  fetch(source, buffer, layout, checksums, until_s=...)

    generator -> learner   key (32 bytes), stamp (8 bytes)
    learner -> generator   size (8 bytes; 0 if no slot holds that publication), then the slot's bytes

A connection serves one request and ends. One thread serves all of them, however many there are: the kernel
sends a slot's memory by itself. The key, drawn for each start of the learner, keeps strangers out; nothing is
encrypted. The checksums of the order tell whether the bytes are the learner's.
"""

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from asyncrl.errors import TransferError
from asyncrl.weights.layout import Layout, verify

log = logging.getLogger(__name__)

_REQUEST = struct.Struct("<32sQ")
_SIZE = struct.Struct("<Q")
_BACKLOG = 1024
# Connections that have not presented the key yet. One more closes the oldest of them.
_MOST_STRANGERS = 256
# Bound on one call of the kernel, so that no reader keeps the thread from the others.
_PIECE_BYTES = 8 << 20
_ROUND_S = 0.5
# Pause after a connection that could not be accepted.
_FULL_S = 0.2
_END_S = 5.0


@dataclass(slots=True, eq=False)
class _Reader:
    """A connection: first it presents its request, then it is sent a slot."""

    channel: socket.socket
    # Without progress until then, it is closed.
    until_s: float
    request: bytearray = field(default_factory=bytearray)
    file: int = -1
    sent: int = 0

    @property
    def is_stranger(self) -> bool:
        return self.file < 0


class SlotServer:
    """Serves whole slots from one thread. `find` returns the open file of a publication's slot, or -1."""

    def __init__(self, host: str, find: Callable[[int], int], size_bytes: int, *, stall_s: float) -> None:
        """Listen on one address of this host. Raises OSError.

        Args:
            host: the address; IPv6 without brackets.
            size_bytes: the size of every slot.
            stall_s: a connection without progress for this long is closed.
        """
        self._find, self._size_bytes, self._stall_s = find, size_bytes, stall_s
        self._key = secrets.token_bytes(32)
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._host, self._port = host, self._listener.getsockname()[1]
        self._ending = os.eventfd(0, os.EFD_CLOEXEC)
        self._readers: dict[int, _Reader] = {}
        self._selector = selectors.DefaultSelector()
        for file in (self._listener, self._ending):
            self._selector.register(file, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="asyncrl-weights-tcp", daemon=True)
        self._thread.start()

    def source(self, stamp: int) -> dict[str, Any]:
        """Plain values with which `fetch` gets the publication `stamp`; secret, as they hold the key."""
        return {"host": self._host, "port": self._port, "key": self._key, "stamp": stamp}

    def close(self) -> None:
        """End the thread and all connections."""
        if self._ending >= 0:
            os.eventfd_write(self._ending, 1)
            self._thread.join(_END_S)
            os.close(self._ending)
            self._ending = -1

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except Exception:
            log.exception("no weights are served over TCP any more; restart the learner")
        finally:
            for file in [self._listener, *(reader.channel for reader in self._readers.values())]:
                file.close()
            self._selector.close()

    def _round(self) -> bool:
        """Serve what is ready; False once `close` has been called."""
        for key, _ in self._selector.select(_ROUND_S):
            if key.fd == self._ending:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif (reader := self._readers.get(key.fd)) is not None:
                try:
                    goes_on = self._hear(reader) if reader.is_stranger else self._send(reader)
                except OSError:  # the other side has gone
                    goes_on = False
                if not goes_on:
                    self._drop(reader)
        now_s = time.monotonic()
        for reader in [each for each in self._readers.values() if now_s > each.until_s]:
            self._drop(reader)
        return True

    def _accept(self) -> None:
        strangers = [reader for reader in self._readers.values() if reader.is_stranger]
        if len(strangers) >= _MOST_STRANGERS:
            self._drop(strangers[0])
        try:
            channel = self._listener.accept()[0]
        except OSError as error:  # for example, too many open files
            log.warning("a connection for weights is not accepted yet: %s", error)
            time.sleep(_FULL_S)
            return
        channel.setblocking(False)
        self._readers[channel.fileno()] = _Reader(channel, time.monotonic() + self._stall_s)
        self._selector.register(channel, selectors.EVENT_READ)

    def _hear(self, reader: _Reader) -> bool:
        """Read the request; False if the connection is to be closed."""
        piece = reader.channel.recv(_REQUEST.size - len(reader.request))
        reader.request += piece
        if len(reader.request) < _REQUEST.size:
            return bool(piece)
        key, stamp = _REQUEST.unpack(reader.request)
        if not hmac.compare_digest(key, self._key):
            log.warning("weights are asked for with a wrong key from %s", reader.channel.getpeername())
            return False
        reader.file = self._find(stamp)
        reader.channel.sendall(_SIZE.pack(0 if reader.is_stranger else self._size_bytes))
        self._selector.modify(reader.channel, selectors.EVENT_WRITE)
        return not reader.is_stranger

    def _send(self, reader: _Reader) -> bool:
        """Send what the connection takes now; False if the connection is to be closed."""
        left = min(self._size_bytes - reader.sent, _PIECE_BYTES)
        sent = os.sendfile(reader.channel.fileno(), reader.file, reader.sent, left)
        reader.sent += sent
        reader.until_s = time.monotonic() + self._stall_s
        return sent > 0 and reader.sent < self._size_bytes

    def _drop(self, reader: _Reader) -> None:
        del self._readers[reader.channel.fileno()]
        self._selector.unregister(reader.channel)
        reader.channel.close()


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
    try:
        host, port = str(source["host"]), int(source["port"])
        request = _REQUEST.pack(bytes(source["key"]), int(source["stamp"]))
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise TransferError(f"weights over tcp: malformed order ({error!r})") from error
    memory, arrived = buffer.numpy().data, 0
    try:
        with contextlib.closing(socket.create_connection((host, port), timeout=_left_s(until_s))) as channel:
            channel.sendall(request)
            _require_size(channel, layout.total_bytes, until_s)
            for index, end in enumerate(layout.offsets[1:]):
                while arrived < end:
                    channel.settimeout(_left_s(until_s))
                    if not (count := channel.recv_into(memory[arrived:])):
                        raise ConnectionError("the learner closed the connection")
                    arrived += count
                    on_progress()
                verify(buffer, layout, checksums, index)
    except OSError as error:  # TimeoutError is one, too
        raise TransferError(
            f"weights over tcp from {host}:{port}: {arrived:,} of {layout.total_bytes:,} bytes arrived "
            f"({error}); the next order brings them again. If it repeats, check that this host reaches every "
            "port of that address, and raise weights.deadline_s if the network is slow"
        ) from error


def _require_size(channel: socket.socket, size_bytes: int, until_s: float) -> None:
    """Read the size that the server announces. Raises ConnectionError if it is another one."""
    header = bytearray()
    while len(header) < _SIZE.size:
        channel.settimeout(_left_s(until_s))
        if not (piece := channel.recv(_SIZE.size - len(header))):
            raise ConnectionError("the learner closed the connection: it has another key, or has restarted")
        header += piece
    (announced,) = _SIZE.unpack(header)
    if announced != size_bytes:
        found = f"has {announced:,} bytes" if announced else "no longer has this version"
        raise ConnectionError(f"the learner {found}")


def _left_s(until_s: float) -> float:
    """Seconds until then. Raises TimeoutError if there are none."""
    if (left_s := until_s - time.monotonic()) <= 0:
        raise TimeoutError("the deadline has passed")
    return left_s
