"""A store, or what stands before it, that misbehaves on the wire: no call lasts longer than it may, what
passes is waited for."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from asyncrl.buffer import connection as module
from asyncrl.buffer.connection import StoreConnection
from asyncrl.errors import StoreError, StoreRefused
from tests.support.waiting import let_pass

RETRY_S = 1.5
WEB_PROXY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"


@contextmanager
def peer(answer: Callable[[socket.socket, int], None]) -> Iterator[str]:
    """The address of one whose `answer(connection, how many before)` follows each request."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        count = 0

        def serve() -> None:
            nonlocal count
            while True:
                try:
                    accepted, _ = server.accept()
                except OSError:
                    return
                with accepted:
                    while accepted.recv(4096):
                        count += 1
                        try:
                            answer(accepted, count - 1)
                        except OSError:
                            break

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"redis://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)


def ask(url: str, retry_s: float = RETRY_S) -> object:
    with closing(StoreConnection(url, retry_s=retry_s)) as store:
        return store.call(lambda client: client.get("x"))


def drip(connection: socket.socket, _: int) -> None:
    connection.sendall(b"$1000\r\n")
    for _ in range(1000):
        connection.sendall(b"x")
        let_pass(0.05)


def test_a_peer_that_drips_bytes_does_not_hold_a_call(monkeypatch):
    monkeypatch.setattr(module, "SOCKET_TIMEOUT_S", 0.5)
    started_s = time.monotonic()
    with peer(drip) as url, pytest.raises(StoreError, match="has not answered for"):
        ask(url)
    assert time.monotonic() - started_s < 25.0, "the whole answer takes 50 s"


def test_a_large_answer_may_take_longer_than_its_bound():
    """The bound moves by what has arrived: what a slow network brings is not thrown away."""
    left, right = socket.socketpair()
    with left, right:
        wrapped = module.bounded_kind(type("Kind", (), {"_connect": lambda self: left}))()._connect()
        right.sendall(bytes(1000))
        until_s = time.monotonic() + 60.0
        with module.bounded(until_s):
            assert wrapped.recv_into(bytearray(1000)) == 1000
            assert module._call.until_s == pytest.approx(until_s + 1000 / module.SLOWEST_BYTES_PER_S)
        with module.bounded(time.monotonic() - 1.0), pytest.raises(TimeoutError):
            wrapped.recv(1)


def test_one_bad_answer_of_a_proxy_is_asked_again():
    with peer(lambda connection, before: connection.sendall(b"$2\r\nok\r\n" if before else WEB_PROXY)) as url:
        assert ask(url, retry_s=30.0) == b"ok"


def test_a_peer_that_is_no_store_is_given_up_after_the_time_to_retry():
    with (
        peer(lambda connection, _: connection.sendall(WEB_PROXY)) as url,
        pytest.raises(StoreError, match="Protocol") as found,
    ):
        ask(url)
    assert not isinstance(found.value, StoreRefused), "a restart may mend it"
