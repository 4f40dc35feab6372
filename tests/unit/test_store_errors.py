"""What a store answers, read by the client's own parser: tried again, or given up at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from redis import Redis
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError, MovedError, RedisError, TimeoutError

from asyncrl.buffer.connection import StoreConnection
from asyncrl.errors import StoreError, StoreRefused
from tests.support.waiting import LONG_S

WILL_PASS = (
    "ASK 3999 127.0.0.1:6381",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "CLUSTERDOWN Hash slot not served",
    "CLUSTERDOWN The cluster is down",
    "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "NOREPLICAS Not enough good replicas to write.",
    "READONLY You can't write against a read only replica.",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "UNKILLABLE Sorry the script already executed write commands against the dataset.",
    "ERR max number of clients reached",
)
WILL_NOT = (
    "NOAUTH Authentication required.",
    "NOPERM User generator has no permissions to run the 'fcall' command",
    "WRONGPASS invalid username-password pair or user is disabled.",
    "ERR unknown command 'FCALL', with args beginning with: ",
)
MISTAKES = (
    "ERR wrong number of arguments for 'fcall' command",
    "WRONGTYPE Operation against a key holding the wrong kind of value",
)


def answered(errors: list[RedisError]) -> str:
    """What a call comes to, on a server that gives these errors and then an answer."""

    def request(client: Redis) -> str:
        if errors:
            raise errors.pop(0)
        return "answer"

    return StoreConnection("redis://store:6379", retry_s=5.0).call(request, tag="{run:train}")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://h:1/0?foo=bar", "is redis://h:1/0.foo=bar: .*'foo'"),
        ("redis://h:1/0?timeout=5", "'timeout'"),
        ("redis://h:1/0?ssl_ca_certs=x", "'ssl_ca_certs'"),
        ("rediss://h:1/0?ssl_cert_reqs=zzz", "zzz"),
        ("redis://a..b:1/0", "label"),
        (f"redis://{'a' * 64}:1/0", "label"),
        ("redis://u:secret@[fd00::9:6379/0", "is not a URL: Invalid IPv6 URL"),
        ("ftp://h", "is ftp://h: .*; use redis://"),
    ],
)
def test_a_url_with_which_no_connection_can_be_made_is_refused(url, said):
    with pytest.raises(StoreRefused, match=f"^store.url .*{said}") as error:
        StoreConnection(url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://[fe80::1]:1/0?protocol=3&health_check_interval=5",
        "unix:///a.socket?db=1",
        "rediss://a_b.:1?ssl_ca_certs=x",
    ],
)
def test_other_urls_pass(url):
    assert StoreConnection(url).url == url


@pytest.mark.parametrize("reply", WILL_PASS)
def test_a_server_that_will_answer_later_is_asked_again(reply):
    assert answered([BaseParser.parse_error(reply)]) == "answer"


@pytest.mark.parametrize("reply", [reply for reply in WILL_PASS if not reply.startswith(("ASK", "ERR"))])
def test_also_in_a_transaction(reply):
    """EXEC puts words before the code, and the client knows no class of it."""
    error = BaseParser.parse_error(f"EXECABORT Transaction discarded because of: {reply}")
    assert answered([error]) == "answer"


@pytest.mark.parametrize("error", [ConnectionError("refused"), TimeoutError("no answer")])
def test_a_server_that_is_away_is_asked_again(error):
    assert answered([error, error]) == "answer"


@pytest.mark.parametrize("reply", WILL_NOT)
def test_a_server_that_will_never_answer_is_refused_at_once(reply):
    with pytest.raises(StoreRefused, match="redis://store:6379 refused a call"):
        answered([BaseParser.parse_error(reply)])


@pytest.mark.parametrize("reply", MISTAKES)
def test_any_other_error_is_ours_and_ends_the_call(reply):
    with pytest.raises(StoreError, match="refused a call") as found:
        answered([BaseParser.parse_error(reply)])
    assert not isinstance(found.value, StoreRefused)


def test_threads_that_are_redirected_together_share_a_connection(monkeypatch):
    store = StoreConnection("redis://first:1", retry_s=60.0)
    first, connect = store.client, store._connect
    moved, connecting = threading.Barrier(2), threading.Barrier(2)

    def slowly(url: str) -> Redis:
        with suppress(threading.BrokenBarrierError):  # the other thread is kept from connecting, too
            connecting.wait(0.5)
        return connect(url)

    monkeypatch.setattr(store, "_connect", slowly)

    def request(client: Redis) -> Redis:
        if client is first:
            moved.wait(LONG_S)
            raise MovedError("1 second:2")
        return client

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda tag: store.call(request, tag=tag), ("{a}", "{b}"))
    assert one is other, "a second connection would be forgotten, and never closed"


def test_a_call_that_fails_late_keeps_the_node_that_another_has_found():
    store = StoreConnection("redis://first:1", retry_s=60.0)
    first, asked = store.client, list[str]()

    def moved_to(address: str, tag: str) -> None:
        def request(client: Redis) -> None:
            if client is first:
                raise MovedError(f"1 {address}")

        store.call(request, tag=tag)

    def request(client: Redis) -> None:
        asked.append(client.connection_pool.connection_kwargs["host"])
        if client is first:
            # Meanwhile another thread is redirected.
            moved_to("third:3", "{a}")
            raise ConnectionError("the first node is away")

    moved_to("second:2", "{b}")
    store.call(request, tag="{a}")
    assert asked == ["first", "third"]
