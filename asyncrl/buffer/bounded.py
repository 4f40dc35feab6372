"""A bound on a whole call to the store: a socket's own timeout is for one read, and a peer that drips bytes never meets it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# An answer may take longer than its bound when it is large: a slow network is no fault, a drip is one.
SLOWEST_BYTES_PER_S = 1 << 20


class _Call(threading.local):
    """The call that this thread makes."""

    until_s = float("inf")


_call = _Call()


@contextmanager
def bounded(until_s: float) -> Iterator[None]:
    """Reads of this thread end with TimeoutError after `until_s` (monotonic), except of large answers that still arrive."""
    before_s, _call.until_s = _call.until_s, until_s
    try:
        yield
    finally:
        _call.until_s = before_s


class _Socket:
    """A socket whose reads keep to the bound of the call."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def recv_into(self, *arguments: Any) -> int:
        """As of a socket."""
        _check()
        count: int = self._plain.recv_into(*arguments)
        _call.until_s += count / SLOWEST_BYTES_PER_S
        return count

    def recv(self, *arguments: Any) -> bytes:
        """As of a socket."""
        _check()
        data: bytes = self._plain.recv(*arguments)
        _call.until_s += len(data) / SLOWEST_BYTES_PER_S
        return data


def _check() -> None:
    if time.monotonic() > _call.until_s:
        raise TimeoutError("the answer had not ended when the time of the call was over")


@cache
def bounded_kind(kind: type[Any]) -> type[Any]:
    """A class of the client's connections, with sockets that keep to the bound of the call."""

    class Bounded(kind):  # type: ignore[misc]
        def _connect(self) -> Any:
            return _Socket(super()._connect())

    return Bounded
