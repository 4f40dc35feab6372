"""What the store knows about the run it serves: one record per store, read by generators that have no config.

The record is sealed: a keyed BLAKE2b over every field, by a key that the learner and its generators have and the store has not.
The seal is checked before anything in the record is used, so whoever runs the store cannot tell a generator what to do.
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
    """The run that a store serves. Never holds a secret: everyone who may read the store may read it."""

    name: str
    config_json: str
    config_hash: str
    release: str
    # Tells keys of frames apart without giving them away.
    key_id: str
    # Where the learner's control plane listens; empty until it does.
    control_endpoint: str = ""


class RunRecord:
    """The record, over a connection that other parts may share."""

    def __init__(self, connection: StoreConnection, key: bytes) -> None:
        """`key` seals the record: `launch.keys.JoinKeys.record`."""
        self._connection = connection
        self._key = key

    def claim(self, run: StoredRun, *, fresh: bool) -> None:
        """Make this store serve `run`. `fresh` first deletes what it kept of a run of that name.

        A learner that starts without a checkpoint is fresh: groups of an earlier run must not be trained. A resumed
        run may have another config; the record is then replaced. Raises ForeignRunError.
        """
        self._connection.check()
        self._hold(run.name)
        if fresh:
            self._connection.on_every_node(lambda node: node.call(lambda client: _delete_lanes(client, run.name)))
        self._write(run)

    def renew(self, run: StoredRun) -> None:
        """Once in a while: the whole record again, should the store have been wiped or rolled back. Cheap.

        Raises ForeignRunError.
        """
        self._hold(run.name)
        self._write(run)

    def _hold(self, name: str) -> None:
        """Raises ForeignRunError where another run has the store."""
        holder = self._connection.call(lambda client: _claim_name(client, name), tag=_KEY)
        if holder != name:
            raise ForeignRunError(
                f"store {self._connection.url} serves run {holder!r}, not {name!r}; one store serves one run: use another "
                f"store.url (another database number will do), or, if {holder!r} is over, delete its record: redis-cli del {_KEY}"
            )

    def _write(self, run: StoredRun) -> None:
        record: Mapping[Any, Any] = {**asdict(run), _SEAL: _seal(run, self._key)}
        self._connection.call(lambda client: client.hset(_KEY, mapping=dict(record)), tag=_KEY)

    def read(self) -> StoredRun:
        """The run that the store serves, as its learner wrote it.

        Raises StoreError when no learner has claimed the store yet, ForeignRunError when one with other keys has, and
        StoreRefused when somebody without the keys has changed the record.
        """
        record: dict[Any, Any] = self._connection.call(lambda client: client.hgetall(_KEY), tag=_KEY)
        values = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in record.items()}
        try:
            run = StoredRun(**{name: values[name] for name in StoredRun.__dataclass_fields__})
            seal = values[_SEAL]
        except KeyError as error:
            raise StoreError(
                f"store {self._connection.url} serves no run yet; start the learner first, or check store.url"
            ) from error
        if not hmac.compare_digest(seal.encode(), _seal(run, self._key).encode()):
            self._refuse(run)
        return run

    def _refuse(self, run: StoredRun) -> None:
        if run.key_id != key_id(self._key):
            raise ForeignRunError(
                f"run {run.name!r} of store {self._connection.url} has another secret; use the join.key of the learner's run "
                "directory"
            )
        raise StoreRefused(
            f"the record of run {run.name!r} in store {self._connection.url} was not written by the run's learner, so nothing in "
            "it is used; find out who else writes into this store, and try again: a learner that is up writes its record anew "
            "every second"
        )

    def holder(self) -> str | None:
        """The name of the run that has the store, for messages only: nobody vouches for it."""
        name = self._connection.call(lambda client: client.hget(_KEY, "name"), tag=_KEY)
        return name.decode(errors="replace") if isinstance(name, bytes) else None


def key_id(key: bytes) -> str:
    """A short name of a key, safe to publish: by it a generator knows whether it has the run's."""
    return hashlib.sha256(b"asyncrl key id " + key).hexdigest()[:12]


def _seal(run: StoredRun, key: bytes) -> str:
    text = json.dumps(asdict(run), sort_keys=True).encode()
    return hashlib.blake2b(text, key=key, digest_size=32).hexdigest()


def _claim_name(client: redis.Redis, name: str) -> str:
    holder: Any = None
    while holder is None:  # not more than once, unless the store is wiped at this very moment
        client.hsetnx(_KEY, "name", name)
        holder = client.hget(_KEY, "name")
    return str(holder.decode())


def _delete_lanes(client: redis.Redis, name: str) -> None:
    lanes = {key.rpartition(b":")[0] for key in client.scan_iter(match=f"{hash_tag(name, '*')}:*", count=_SCAN_COUNT)}
    for lane in sorted(lanes):
        places = {place: b"%s:%s" % (lane, place.encode()) for place in PLACES}
        epoch: Any = client.hget(places["meta"], "epoch")
        # At once, with what a generator may have added since: half a lane would be no history of any run. The epoch stays,
        # so that a learner that is still alive is fenced and does not take this for a store that was wiped.
        with client.pipeline(transaction=True) as transaction:
            transaction.unlink(*places.values())
            if epoch is not None:
                transaction.hset(places["meta"], "epoch", epoch)
            transaction.execute()
