"""One connection to the store: bounded retries of idempotent calls, and errors that name the store without its password."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from asyncrl.errors import StoreError, StoreRefused

T = TypeVar("T")

SOCKET_TIMEOUT_S = 10.0
PLAIN: Mapping[str, Any] = {"protocol": 2, "driver_info": None}
"""No greeting beyond the password: a server with least rights refuses it, and none may send the client elsewhere."""
READ_BYTES = 1 << 20
"""A batch of frames is megabytes; the client's own 32 KiB would mean a system call for each."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
_PASSING = ("BUSY", "LOADING", "MISCONF", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "UNKILLABLE")
"""Error codes of a server that will answer later."""
_LASTING = ("unknown command", "ACL failure in script", "The user executing the script can't", "Protocol error: unauthenticated")
"""A server without functions, one that refuses what a function does, and one that takes only short calls of strangers."""
_REFUSALS = (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    InvalidResponse,
    NoPermissionError,
)
"""What a wrong password or address gives."""
MINIMUM_VERSION = (7, 0)


class StoreConnection:
    """A connection pool to one store; safe to use from several threads.

    The client's own retries are off: it repeats every command, also those that must not be repeated.
    """

    def __init__(self, url: str, *, password: str | None = None, retry_s: float = 30.0) -> None:
        self.url = _without_password(url)
        self._retry_s = retry_s
        try:
            self.client: redis.Redis = redis.Redis.from_url(
                url,
                **({"password": password} if password else {}),
                retry=Retry(NoBackoff(), 0),
                socket_timeout=SOCKET_TIMEOUT_S,
                socket_read_size=READ_BYTES,
                **PLAIN,
                **({} if url.startswith("unix:") else {"socket_connect_timeout": SOCKET_TIMEOUT_S}),
            )
        except ValueError as error:
            raise StoreRefused(f"store.url is {self.url}: {error}; use redis://, rediss:// or unix://") from error

    def call(self, request: Callable[[redis.Redis], T]) -> T:
        """The answer to `request`, which must be idempotent: it is made again for `retry_s` seconds while the store is away."""
        deadline, pause_s = time.monotonic() + self._retry_s, FIRST_PAUSE_S
        while True:
            try:
                return request(self.client)
            except RedisError as error:
                if not _passing(error):
                    kind = StoreRefused if _lasting(error) else StoreError
                    raise kind(f"store {self.url} refused a call: {type(error).__name__}: {error}") from error
                if time.monotonic() + pause_s > deadline:
                    raise StoreError(
                        f"store {self.url} has not answered for {self._retry_s:.0f} s ({type(error).__name__}: {error}); "
                        "check that it runs, and store.url"
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def check(self) -> None:
        """Refuse a store that is too old or would throw groups away."""
        server: dict[str, Any] = self.call(lambda client: client.info("server"))
        version = str(server["redis_version"])
        if tuple(map(int, version.split(".")[:2])) < MINIMUM_VERSION:
            raise StoreRefused(f"store {self.url} runs version {version}; functions need Redis >= 7.0 or Valkey: upgrade it")
        policy = self.call(lambda client: client.info("memory"))["maxmemory_policy"]
        if policy != "noeviction":
            raise StoreRefused(
                f"store {self.url} has maxmemory-policy {policy}, which throws stored groups away when memory is short; "
                "set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
            )

    def check_room(self, cap_bytes: int) -> None:
        """Refuse a store whose own memory limit is below the cap on stored groups.

        Over the cap a group that the learner waits for is still let in, over the store's own limit none is: the run would stop.
        """
        limit_bytes = int(self.call(lambda client: client.info("memory"))["maxmemory"])
        if 0 < limit_bytes < cap_bytes:
            raise StoreRefused(
                f"store {self.url} has maxmemory {limit_bytes / 2**30:.3g} GiB, below store.max_gib ({cap_bytes / 2**30:.3g}); "
                "full, it would refuse the group that the learner waits for: raise maxmemory (CONFIG SET maxmemory), or lower "
                "store.max_gib"
            )

    def close(self) -> None:
        """Close the sockets."""
        self.client.close()


def _passing(error: RedisError) -> bool:
    if _lasting(error):
        return False
    if isinstance(error, ConnectionError | TimeoutError | BusyLoadingError | ReadOnlyError):
        return True
    return isinstance(error, ResponseError) and reason(error).startswith(_PASSING)


def _lasting(error: RedisError) -> bool:
    """Whether the same call will never be answered."""
    return isinstance(error, _REFUSALS) or (isinstance(error, ResponseError) and reason(error).startswith(_LASTING))


def reason(error: ResponseError) -> str:
    """What the server said, without what the client and EXEC put before it in a transaction."""
    return re.split("caused error: |because of: ", str(error))[-1]


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None and "password=" not in parts.query:
        return url
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"***@{host}" if parts.password else parts.netloc, query="").geturl()
