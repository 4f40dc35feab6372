"""A test of a store: one group passes through all calls, in a new lane."""

import os
import secrets
import time
from dataclasses import dataclass

from asyncrl.buffer.base import BufferRules, PutOutcome
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import RedisBuffer, hash_tag, keys_of
from asyncrl.errors import StoreError

FRAME_BYTES = 1 << 20
SKEW_S = 5.0  # the protocol compares no clocks of two hosts, but people who read logs do


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreProbe:
    """The results of the test."""

    version: str
    seconds: float  # of all calls for one group of `FRAME_BYTES`
    skew_s: float  # the store's clock minus this host's clock


def clock_skew_s(connection: StoreConnection) -> float:
    """Return the store's clock minus this host's clock, in seconds. Raises StoreError."""
    before_s = time.time()
    seconds, microseconds = connection.call(lambda client: client.time())
    return seconds + microseconds / 1e6 - (before_s + time.time()) / 2


def probe_store(connection: StoreConnection, run: str = "probe") -> StoreProbe:
    """Check version and eviction policy, load the functions; lease, put, take, fetch and commit a group.

    They use a lane of `run`, as a user of the store may have rights on that run only. Raises StoreError, also
    if the returned group differs from the stored one.
    """
    connection.check()
    url = connection.url
    server = connection.call(lambda client: client.info("server"))
    valkey = server.get("valkey_version")
    version = f"Valkey {valkey}" if valkey else f"Redis {server['redis_version']}"
    skew_s = clock_skew_s(connection)
    use = "use a Redis >= 7.0 or Valkey server directly"
    lane = f"probe-{secrets.token_hex(8)}"
    buffer = RedisBuffer(connection, run, BufferRules(groups=1), lane=lane)
    ledger, frame = Ledger(), os.urandom(FRAME_BYTES)
    started_s = time.perf_counter()
    try:
        buffer.recover(ledger, version=0, limit=1)
        tickets = buffer.lease("probe", 1).tickets
        if not tickets or buffer.put("probe", tickets[0].id, frame) is not PutOutcome.STORED:
            found = f"store {url} refused a group of {FRAME_BYTES >> 20} MiB"
            raise StoreError(f"{found}; it may be out of memory: raise its maxmemory")
        take = buffer.take(ledger, 1, window=1)
        if take is None or buffer.frames(take.ids) != [frame]:
            raise StoreError(f"store {url} returned a group that differs from the stored one; {use}")
        ledger.consume(take.ids)
        if buffer.commit(ledger.takes, ledger.chain) != 1 or buffer.audit().missing:
            raise StoreError(f"store {url} lost count of a single group; {use}")
        took_s = time.perf_counter() - started_s
    finally:
        tag = hash_tag(run, lane)
        connection.call(lambda client: client.unlink(*keys_of(tag)), tag=tag)
    return StoreProbe(version=version, seconds=took_s, skew_s=skew_s)
