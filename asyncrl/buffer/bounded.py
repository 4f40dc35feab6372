"""A deadline for a whole call to the store: a socket's timeout bounds only a single read."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# A reply that arrives at this rate or faster extends its deadline: large replies may take longer.
SLOWEST_BYTES_PER_S = 1 << 20


class _Call(threading.local):
    """The deadline of the call that this thread is making."""

    until_s = float("inf")


_call = _Call()


@contextmanager
def bounded(until_s: float) -> Iterator[None]:
    """Reads of this thread raise TimeoutError after `until_s` (monotonic), or later while bytes arrive."""
    before_s, _call.until_s = _call.until_s, until_s
    try:
        yield
    finally:
        _call.until_s = before_s


class _Socket:
    """A socket whose reads obey the deadline of the call."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def recv_into(self, *arguments: Any) -> int:
        _check()
        count: int = self._plain.recv_into(*arguments)
        _call.until_s += count / SLOWEST_BYTES_PER_S
        return count

    def recv(self, *arguments: Any) -> bytes:
        _check()
        data: bytes = self._plain.recv(*arguments)
        _call.until_s += len(data) / SLOWEST_BYTES_PER_S
        return data


def _check() -> None:
    if time.monotonic() > _call.until_s:
        raise TimeoutError("the reply was not complete at the deadline of the call")


@cache
def bounded_kind(kind: type[Any]) -> type[Any]:
    """A subclass of a connection class of redis-py whose sockets obey the deadline of the call."""

    class Bounded(kind):  # type: ignore[misc]
        def _connect(self) -> Any:
            return _Socket(super()._connect())

    return Bounded
