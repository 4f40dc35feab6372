"""A connection to the store, with bounded retries of idempotent calls.

The store is a single server or a cluster. A call with a `tag` touches only keys with that hash tag, which one
node serves. The first node that is asked redirects the call to that node (MOVED), which gets the next calls
until it fails or redirects again. redis-py's RedisCluster does this too, but cannot connect to a single
server, and calls COMMAND and CLUSTER SLOTS on every node, which a generator's user may not do.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, RedisError, ResponseError
from redis.retry import Retry

from asyncrl.backoff import Backoff
from asyncrl.errors import StoreError, StoreRefused
from asyncrl.hosting.progress import beat

T = TypeVar("T")

SOCKET_TIMEOUT_S = 10.0
# The client sends only the password: a user with few rights may not send more. No server may redirect it.
PLAIN: Mapping[str, Any] = {"protocol": 2, "driver_info": None}
# The longest wait for a store that loads its data: hundreds of GiB from a slow disk.
LOADING_S = 3600.0
# A reply that arrives at this rate or faster extends the deadline of its call: large replies may take longer.
SLOWEST_BYTES_PER_S = 1 << 20
BACKOFF = Backoff(0.02, 0.2)
MINIMUM_VERSION = (7, 0)


@dataclass(frozen=True, slots=True)
class _Errors:
    """A kind of errors: classes of the client, and beginnings of the server's answers.

    The client has classes for some answers only, and EXEC hides all classes.
    """

    classes: tuple[type[RedisError], ...]
    answers: tuple[str, ...]

    def __contains__(self, error: RedisError) -> bool:
        is_answer = isinstance(error, ResponseError) and reason(error).startswith(self.answers)
        return is_answer or isinstance(error, self.classes)


# The server is starting: it answers, so it is not down.
_LOADING = _Errors((exceptions.BusyLoadingError,), ("LOADING",))
# The same call may succeed later. InvalidResponse comes from a proxy without its store, or was cut off.
_TRANSIENT = _Errors(
    (
        exceptions.AskError,
        exceptions.ClusterDownError,
        exceptions.ConnectionError,
        exceptions.InvalidResponse,
        exceptions.ReadOnlyError,
        exceptions.TimeoutError,
        exceptions.TryAgainError,
    ),
    (
        *_LOADING.answers,
        "BUSY",
        "CLUSTERDOWN",
        "MASTERDOWN",
        "MISCONF",
        "NOREPLICAS",
        "READONLY",
        "TRYAGAIN",
        "UNKILLABLE",
    ),
)
# The same call will never succeed: a wrong password (also a ConnectionError), a missing right, a server
# without functions, a server that accepts only short calls without a login.
_REFUSED = _Errors(
    (
        exceptions.AuthenticationError,
        exceptions.AuthenticationWrongNumberOfArgsError,
        exceptions.AuthorizationError,
        exceptions.NoPermissionError,
    ),
    (
        "unknown command",
        "ACL failure in script",
        "The user executing the script can't",
        "Protocol error: unauthenticated",
    ),
)


class _Call(threading.local):
    """The deadline of the call that this thread is making. A socket's timeout bounds only a single read."""

    until_s = float("inf")

    def check(self) -> None:
        if time.monotonic() > self.until_s:
            raise TimeoutError("the reply was not complete at the deadline of the call")


_call = _Call()


@contextlib.contextmanager
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
        _call.check()
        count: int = self._plain.recv_into(*arguments)
        _call.until_s += count / SLOWEST_BYTES_PER_S
        return count

    def recv(self, *arguments: Any) -> bytes:
        _call.check()
        data: bytes = self._plain.recv(*arguments)
        _call.until_s += len(data) / SLOWEST_BYTES_PER_S
        return data


@cache
def bounded_kind(kind: type[Any]) -> type[Any]:
    """Return a subclass of a redis-py connection class whose sockets obey the deadline of the call."""

    class Bounded(kind):  # type: ignore[misc]
        def _connect(self) -> Any:
            return _Socket(super()._connect())

    return Bounded


class StoreConnection:
    """A connection pool to one store, safe to use from several threads.

    The client's own retries are off, because it would also repeat commands that must not be repeated. Errors
    name the store without its password.
    """

    def __init__(self, url: str, *, password: str | None = None, retry_s: float = 30.0) -> None:
        self.url = "not a URL"  # unless it can be read
        self._secret_url, self._password, self._retry_s = url, password, retry_s
        # The other known nodes of a cluster. Threads that are redirected at the same time share them.
        self._lock = threading.Lock()
        self._by_address: dict[tuple[str, int], redis.Redis] = {}
        self._by_tag: dict[str, redis.Redis] = {}
        try:
            self.url = _without_password(url)
            self.client: redis.Redis = self._connect(url)
        except (TypeError, ValueError, RedisError) as error:
            found = f"store.url is {self.url}: {error}"
            raise StoreRefused(f"{found}; use redis://, rediss:// or unix://") from error

    def _connect(self, url: str) -> redis.Redis:
        client: redis.Redis = redis.Redis.from_url(
            url,
            **({"password": self._password} if self._password else {}),
            retry=Retry(NoBackoff(), 0),
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_read_size=1 << 20,  # a batch of frames has megabytes, and the default is 32 KiB
            **PLAIN,
            **({} if url.startswith("unix:") else {"socket_connect_timeout": SOCKET_TIMEOUT_S}),
        )
        pool = client.connection_pool
        pool.connection_class = bounded_kind(pool.connection_class)
        # Each connection would meet an option that the client lacks, and a host that no name can be.
        pool.connection_class(**pool.connection_kwargs)
        pool.connection_kwargs.get("host", "").encode("idna")
        return client

    def on_every_node(self, do: Callable[["StoreConnection"], None]) -> None:
        """Call `do` with this connection or, in a cluster, with one to each node that serves keys."""
        # `redis_mode` of the section `server` has another name in Valkey.
        found: dict[str, Any] = self.call(lambda client: client.info("cluster"))
        if not found.get("cluster_enabled"):
            do(self)
            return
        slots: Any = self.call(lambda client: client.cluster("SLOTS"))
        primaries = (entry[2][:2] for entry in slots)
        for host, port in sorted({(h.decode() if isinstance(h, bytes) else h, int(p)) for h, p in primaries}):
            url = self._url_of(host, port)
            node = StoreConnection(url, password=self._password, retry_s=self._retry_s)
            with contextlib.closing(node):
                do(node)

    def _url_of(self, host: str, port: int) -> str:
        parts = urlsplit(self._secret_url)
        user, at, here = parts.netloc.rpartition("@")
        host = f"[{host}]" if ":" in host else host or here.rpartition(":")[0]
        return parts._replace(netloc=f"{user}{at}{host}:{port}").geturl()

    def _ask_another(self, tag: str, asked: redis.Redis, error: RedisError) -> None:
        """Ask the node that a redirection names, or after another error the next known one, which redirects.

        A thread whose call to the failed node ends later stays with what others have found meanwhile.
        """
        with self._lock:
            if isinstance(error, MovedError):
                address = (error.host, error.port)
                if address not in self._by_address:
                    self._by_address[address] = self._connect(self._url_of(*address))
                self._by_tag[tag] = self._by_address[address]
            elif self._by_tag.get(tag, self.client) is asked:
                known = [self.client, *self._by_address.values()]
                self._by_tag[tag] = known[(known.index(asked) + 1) % len(known)]

    def call(self, request: Callable[[redis.Redis], T], *, tag: str = "") -> T:
        """Return the answer to an idempotent `request`; repeats it for `retry_s` while the store is down.

        For a store that is loading its data the limit is `LOADING_S`. In every case the call ends at most
        `SOCKET_TIMEOUT_S` later, unless a large answer is still arriving.
        """
        began_s, failures = time.monotonic(), 0
        deadline = began_s + self._retry_s
        while True:
            client = self._by_tag.get(tag, self.client)
            try:
                with bounded(deadline):
                    return request(client)
            except RedisError as error:
                if error in _REFUSED or error not in _TRANSIENT:
                    kind = StoreRefused if error in _REFUSED else StoreError
                    raise kind(f"store {self.url} refused a call: {type(error).__name__}: {error}") from error
                if tag:
                    self._ask_another(tag, client, error)
                if error in _LOADING:  # it answers, so it is alive
                    beat()
                    deadline = min(time.monotonic() + self._retry_s, max(deadline, began_s + LOADING_S))
                failures += 1
                pause_s = BACKOFF.pause_s(failures)
                if time.monotonic() + pause_s > deadline:
                    waited_s, found = time.monotonic() - began_s, f"{type(error).__name__}: {error}"
                    found = f"store {self.url} has not answered for {waited_s:.0f} s ({found})"
                    raise StoreError(f"{found}; check that it runs, and store.url") from error
            time.sleep(pause_s)

    def check(self, cap_bytes: int = 0) -> None:
        """Raise StoreRefused for a store that is too old, would delete stored groups, or has too little room.

        Above `cap_bytes`, the cap on stored groups, the store still accepts a group that the learner waits
        for. Above the store's own memory limit it accepts none, and the run would stop.
        """

        def check_node(node: StoreConnection) -> None:
            server: dict[str, Any] = node.call(lambda client: client.info("server"))
            memory: dict[str, Any] = node.call(lambda client: client.info("memory"))
            version, policy = str(server["redis_version"]), memory["maxmemory_policy"]
            if tuple(map(int, version.split(".")[:2])) < MINIMUM_VERSION:
                found = f"store {node.url} runs version {version}"
                raise StoreRefused(f"{found}; functions need Redis >= 7.0 or Valkey: upgrade it")
            if policy != "noeviction":
                found = f"store {node.url} has maxmemory-policy {policy}, which deletes stored groups"
                cure = "set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
                raise StoreRefused(f"{found} when memory is short; {cure}")
            if 0 < (limit_bytes := int(memory["maxmemory"])) < cap_bytes:
                found = f"store {node.url} has maxmemory {limit_bytes / 2**30:.3g} GiB, below store.max_gib"
                found += f" ({cap_bytes / 2**30:.3g})"
                cure = "raise maxmemory (CONFIG SET maxmemory), or lower store.max_gib"
                raise StoreRefused(f"{found}; full, it would refuse the group the learner waits for: {cure}")

        self.on_every_node(check_node)

    def close(self) -> None:
        for client in (self.client, *self._by_address.values()):
            client.close()


def reason(error: ResponseError) -> str:
    """Return the server's text, without the prefixes that the client and EXEC add in a transaction."""
    return re.split("caused error: |because of: ", str(error))[-1]


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None and "password=" not in parts.query:
        return url
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"***@{host}" if parts.password else parts.netloc, query="").geturl()
