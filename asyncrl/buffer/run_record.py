"""What the store knows about the run it serves: one record per store, read by generators that have no config."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import redis

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.redis import PLACES, hash_tag
from asyncrl.errors import ForeignRunError, StoreError

_KEY = "asyncrl:run"
_SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The run that a store serves. Never holds a secret: everyone who may read the store may read it."""

    name: str
    config_json: str
    config_hash: str
    release: str
    key_id: str
    """Tells keys of frames apart without giving them away."""


class RunRecord:
    """The record, over a connection that other parts may share."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection

    def claim(self, run: StoredRun, *, fresh: bool) -> None:
        """Make this store serve `run`. `fresh` first deletes what it kept of a run of that name.

        A learner that starts without a checkpoint is fresh: groups of an earlier run must not be trained. A resumed
        run may have another config; the record is then replaced. Raises ForeignRunError.
        """
        self._connection.check()
        self._hold(run.name)
        if fresh:
            self._connection.on_every_node(lambda node: node.call(lambda client: _delete_lanes(client, run.name)))
        self._write(asdict(run))

    def renew(self, run: StoredRun, control_endpoint: str) -> None:
        """Once in a while: the whole record again, should the store have been wiped or rolled back. Cheap.

        Raises ForeignRunError.
        """
        self._hold(run.name)
        self._write(asdict(run) | {"control_endpoint": control_endpoint})

    def _hold(self, name: str) -> None:
        """Raises ForeignRunError where another run has the store."""
        holder = self._connection.call(lambda client: _claim_name(client, name), tag=_KEY)
        if holder != name:
            raise ForeignRunError(
                f"store {self._connection.url} serves run {holder!r}, not {name!r}; one store serves one run: use another "
                f"store.url (another database number will do), or, if {holder!r} is over, delete its record: redis-cli del {_KEY}"
            )

    def _write(self, values: Mapping[str, str]) -> None:
        record: Mapping[Any, Any] = values
        self._connection.call(lambda client: client.hset(_KEY, mapping=dict(record)), tag=_KEY)

    def read(self) -> StoredRun:
        """The run that the store serves. Raises StoreError when no learner has claimed it yet."""
        record: dict[Any, Any] = self._connection.call(lambda client: client.hgetall(_KEY), tag=_KEY)
        values = {name.decode(): value.decode() for name, value in record.items()}
        try:
            return StoredRun(**{name: values[name] for name in StoredRun.__dataclass_fields__})
        except KeyError as error:
            raise StoreError(
                f"store {self._connection.url} serves no run yet; start the learner first, or check store.url"
            ) from error

    def control_endpoint(self) -> str | None:
        """Where the learner's control plane listens; None until it has said so."""
        endpoint = self._connection.call(lambda client: client.hget(_KEY, "control_endpoint"), tag=_KEY)
        return endpoint.decode() if isinstance(endpoint, bytes) else None


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
