"""The record of the run that a store serves: one per store, read by generators that have no config.

The record has a seal: a keyed BLAKE2b over every field. The learner and its generators have the key, the
store does not. The seal is checked before the record is used, so that the owner of the store cannot give a
generator another config.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import redis

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.redis import PLACES, hash_tag
from asyncrl.errors import ForeignRunError, StoreError, StoreRefused

_KEY = "asyncrl:run"
_SEAL = "seal"
_SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The run that a store serves. It has no secrets, because every user of the store can read it."""

    name: str
    config_json: str
    config_hash: str
    release: str
    # A public name of the key; see `key_id`.
    key_id: str
    # The endpoint of the learner's control plane; empty before it listens.
    control_endpoint: str = ""


class RunRecord:
    """The record, over a connection that other parts may share."""

    def __init__(self, connection: StoreConnection, key: bytes) -> None:
        """`key` seals the record: `run.keys.JoinKeys.record`."""
        self._connection = connection
        self._key = key

    def claim(self, run: StoredRun, *, fresh: bool) -> None:
        """Make this store serve `run`. Raises ForeignRunError.

        `fresh` deletes the data of an earlier run of that name. A learner that starts without a checkpoint
        must do so, because it must not train on groups of an earlier run. The record replaces an older one of
        the run.
        """
        self._connection.check()
        self._hold(run.name)
        if fresh:
            self._connection.on_every_node(
                lambda node: node.call(lambda client: _delete_lanes(client, run.name))
            )
        self._write(run)

    def renew(self, run: StoredRun) -> None:
        """Write the record again, because the store may have lost it. Cheap. Raises ForeignRunError."""
        self._hold(run.name)
        self._write(run)

    def _hold(self, name: str) -> None:
        """Enter the run's name unless the store has one. Raises ForeignRunError if it has another one."""
        holder = self._connection.call(lambda client: _claim_name(client, name), tag=_KEY)
        if holder != name:
            raise ForeignRunError(
                f"store {self._connection.url} serves run {holder!r}, not {name!r}; one store serves one "
                f"run: use another store.url (another database number will do), or, if {holder!r} is over, "
                f"delete its record: redis-cli del {_KEY}"
            )

    def _write(self, run: StoredRun) -> None:
        record: Mapping[Any, Any] = {**asdict(run), _SEAL: _seal(run, self._key)}
        self._connection.call(lambda client: client.hset(_KEY, mapping=dict(record)), tag=_KEY)

    def read(self) -> StoredRun:
        """The run that the store serves, as its learner wrote it.

        Raises StoreError if no learner has claimed the store yet, ForeignRunError if a run with other keys
        has, and StoreRefused if the record was changed without the key.
        """
        record: dict[Any, Any] = self._connection.call(lambda client: client.hgetall(_KEY), tag=_KEY)
        values = {
            name.decode(errors="replace"): value.decode(errors="replace") for name, value in record.items()
        }
        try:
            run = StoredRun(**{name: values[name] for name in StoredRun.__dataclass_fields__})
            seal = values[_SEAL]
        except KeyError as error:
            raise StoreError(
                f"store {self._connection.url} serves no run yet; start the learner first, or check store.url"
            ) from error
        if hmac.compare_digest(seal.encode(), _seal(run, self._key).encode()):
            return run
        if run.key_id != key_id(self._key):
            raise ForeignRunError(
                f"run {run.name!r} of store {self._connection.url} has another secret; use the join.key of "
                "the learner's run directory"
            )
        raise StoreRefused(
            f"the record of run {run.name!r} in store {self._connection.url} was not written by the run's "
            "learner, so nothing in it is used; find out what else writes into this store, and try again: "
            "a running learner writes its record again every second"
        )

    def holder(self) -> str | None:
        """The name of the run that the store serves, for messages only, because it is not verified."""
        name = self._connection.call(lambda client: client.hget(_KEY, "name"), tag=_KEY)
        return name.decode(errors="replace") if isinstance(name, bytes) else None


def key_id(key: bytes) -> str:
    """A short public name of a key, by which a generator knows whether it has the run's key."""
    return hashlib.sha256(b"asyncrl key id " + key).hexdigest()[:12]


def _seal(run: StoredRun, key: bytes) -> str:
    text = json.dumps(asdict(run), sort_keys=True).encode()
    return hashlib.blake2b(text, key=key, digest_size=32).hexdigest()


def _claim_name(client: redis.Redis, name: str) -> str:
    holder: Any = None
    while holder is None:  # a second time only if the store is wiped in between
        client.hsetnx(_KEY, "name", name)
        holder = client.hget(_KEY, "name")
    return str(holder.decode())


def _delete_lanes(client: redis.Redis, name: str) -> None:
    lanes = {
        key.rpartition(b":")[0]
        for key in client.scan_iter(match=f"{hash_tag(name, '*')}:*", count=_SCAN_COUNT)
    }
    for lane in sorted(lanes):
        places = {place: b"%s:%s" % (lane, place.encode()) for place in PLACES}
        epoch: Any = client.hget(places["meta"], "epoch")
        # Atomically, because half a lane is not a valid state. The epoch is kept: it fences a learner that is
        # still running, which would otherwise take the store for a wiped one and recover.
        with client.pipeline(transaction=True) as transaction:
            transaction.unlink(*places.values())
            if epoch is not None:
                transaction.hset(places["meta"], "epoch", epoch)
            transaction.execute()
