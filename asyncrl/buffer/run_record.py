"""The record of the run that a store serves: one per store, read by generators that have no config.

Every reader checks the record's seal, a keyed BLAKE2b over every field, before it uses the record. The store
does not have the key, so its owner cannot give a generator another config.
"""

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import redis

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.redis import PLACES, hash_tag
from asyncrl.config.resolved import config_hash, config_json
from asyncrl.config.schema import Config
from asyncrl.errors import ForeignRunError, StoreError, StoreRefused
from asyncrl.version import __version__

_KEY = "asyncrl:run"
_SEAL = "seal"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The run that a store serves. Every user of the store can read it, so it contains no secrets."""

    name: str
    config_json: str
    config_hash: str
    release: str
    # See the function `key_id`.
    key_id: str
    # The endpoint of the learner's control plane; empty before it listens.
    control_endpoint: str = ""


class RunRecord:
    """Reads and writes the record."""

    def __init__(self, connection: StoreConnection, key: bytes) -> None:
        """`key` is `run.keys.JoinKeys.record`; other parts may share the connection."""
        self._connection = connection
        self._key = key

    def claim(self, run: StoredRun, *, fresh: bool) -> None:
        """Make this store serve `run`; replaces an older record of the run. Raises ForeignRunError.

        `fresh` deletes the data of an earlier run of that name. A learner without a checkpoint needs this,
        because it must not train on groups of an earlier run.
        """
        self._hold(run.name)
        if fresh:
            self._connection.on_every_node(lambda node: node.call(lambda here: _delete_lanes(here, run.name)))
        self._write(run)

    def renew(self, run: StoredRun) -> None:
        """Write the record again, because the store may have lost it. Raises ForeignRunError."""
        self._hold(run.name)
        self._write(run)

    def _hold(self, name: str) -> None:
        """Enter the run's name unless the store has one. Raises ForeignRunError if that is another name."""

        def enter(client: redis.Redis) -> str:
            holder: Any = None
            while holder is None:  # a second time only if the store is wiped in between
                client.hsetnx(_KEY, "name", name)
                holder = client.hget(_KEY, "name")
            return str(holder.decode())

        holder = self._connection.call(enter, tag=_KEY)
        if holder != name:
            raise ForeignRunError(
                f"store {self._connection.url} serves run {holder!r}, not {name!r}; a store serves one run: "
                f"use another store.url, for example another database number, or, if {holder!r} is over, "
                f"delete its record: redis-cli del {_KEY}"
            )

    def _write(self, run: StoredRun) -> None:
        record: Mapping[Any, Any] = {**asdict(run), _SEAL: _seal(run, self._key)}
        self._connection.call(lambda client: client.hset(_KEY, mapping=dict(record)), tag=_KEY)

    def read(self) -> StoredRun:
        """Return the run that the store serves.

        Raises StoreError if no learner has claimed the store yet, ForeignRunError if a run with other keys
        has, and StoreRefused if the record was changed without the key.
        """
        record: dict[Any, Any] = self._connection.call(lambda client: client.hgetall(_KEY), tag=_KEY)
        where = f"store {self._connection.url}"
        values = {k.decode(errors="replace"): v.decode(errors="replace") for k, v in record.items()}
        try:
            run = StoredRun(**{name: values[name] for name in StoredRun.__dataclass_fields__})
            seal = values[_SEAL]
        except KeyError as error:
            raise StoreError(f"{where} serves no run yet; start the learner, or check store.url") from error
        if hmac.compare_digest(seal.encode(), _seal(run, self._key).encode()):
            return run
        if run.key_id != key_id(self._key):
            foreign = f"run {run.name!r} of {where} has another secret"
            raise ForeignRunError(f"{foreign}; use the join.key of the learner's run directory")
        raise StoreRefused(
            f"the record of run {run.name!r} in {where} was not written by the run's "
            "learner, so nothing in it is used; find the program that writes into this store, and try again: "
            "a running learner writes its record every second"
        )

    def holder(self) -> str | None:
        """Return the name of the run that the store serves; not verified, so for messages only."""
        name = self._connection.call(lambda client: client.hget(_KEY, "name"), tag=_KEY)
        return name.decode(errors="replace") if isinstance(name, bytes) else None


def claim_store(
    config: Config, connection: StoreConnection, key: bytes, *, fresh: bool
) -> Callable[[str], None]:
    """Make the store serve this run; return what renews its record with the control plane's endpoint."""
    stored = StoredRun(
        name=config.run.name,
        config_json=config_json(config),
        config_hash=config_hash(config),
        release=__version__,
        key_id=key_id(key),
    )
    record = RunRecord(connection, key)
    connection.check(int(config.store.max_gib * 2**30))
    record.claim(stored, fresh=fresh)
    return lambda endpoint: record.renew(replace(stored, control_endpoint=endpoint))


def key_id(key: bytes) -> str:
    """Return a short public name of a key, which shows a generator whether it has the run's key."""
    return hashlib.sha256(b"asyncrl key id " + key).hexdigest()[:12]


def _seal(run: StoredRun, key: bytes) -> str:
    text = json.dumps(asdict(run), sort_keys=True).encode()
    return hashlib.blake2b(text, key=key, digest_size=32).hexdigest()


def _delete_lanes(client: redis.Redis, name: str) -> None:
    keys = client.scan_iter(match=f"{hash_tag(name, '*')}:*", count=1000)
    lanes = {key.rpartition(b":")[0] for key in keys}
    for lane in sorted(lanes):
        places = {place: b"%s:%s" % (lane, place.encode()) for place in PLACES}
        epoch: Any = client.hget(places["meta"], "epoch")
        # In one transaction, because half a lane is not a valid state. The epoch is kept: it fences a learner
        # that is still running, which would otherwise see a wiped store and recover.
        with client.pipeline(transaction=True) as transaction:
            transaction.unlink(*places.values())
            if epoch is not None:
                transaction.hset(places["meta"], "epoch", epoch)
            transaction.execute()
