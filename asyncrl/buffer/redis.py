"""The buffer in a Redis-compatible store: each operation is one function of functions.lua."""

import hashlib
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

import redis
from redis.exceptions import BusyLoadingError, NoPermissionError, OutOfMemoryError, ResponseError

from asyncrl.algo.staleness import minimum_version
from asyncrl.buffer.base import Audit, BufferRules, DeadLetter, Lease, PutOutcome, Take, one_line
from asyncrl.buffer.connection import StoreConnection, reason
from asyncrl.buffer.ledger import Ledger, sha1_of
from asyncrl.errors import BufferFenced, BufferGap, StoreError
from asyncrl.lineage import INITIAL, History
from asyncrl.types import Ticket

log = logging.getLogger(__name__)

_SOURCE = files("asyncrl.buffer").joinpath("functions.lua").read_text()
# Part of every function's name, so that a release calls only its own code, even if two share a server.
_DIGEST = hashlib.sha256(_SOURCE.encode()).hexdigest()[:12]
LIBRARY = _SOURCE.replace("@DIGEST@", _DIGEST)
# Keys of a lane, in the order of functions.lua.
PLACES = (
    "meta", "leased", "deadlines", "holders", "reissue", "ready", "frames", "takes", "done", "requests",
    "attempts", "deaths", "dead_letters", "counters", "totals",
)  # fmt: skip
# Windows and counts above this bound have the same effect.
MAX_COUNT = 1 << 40


def hash_tag(run: str, lane: str) -> str:
    """Return the prefix of a lane's keys, a hash tag that keeps all of them on one node of a cluster."""
    return f"{{{run}:{lane}}}"


def keys_of(tag: str) -> list[str]:
    """Return the keys of a lane in the order of `PLACES`."""
    return [f"{tag}:{place}" for place in PLACES]


class RedisBuffer:
    """A process's handle on one lane ("train", "eval"), safe to use from several threads; see `Buffer`."""

    def __init__(
        self, connection: StoreConnection, run: str, rules: BufferRules, *, lane: str = "train"
    ) -> None:
        self._connection = connection
        self._where = f"store {connection.url}"
        self._rules = rules
        self._tag = hash_tag(run, lane)
        self._keys = keys_of(self._tag)
        self._frames_key = self._keys[PLACES.index("frames")]
        self._lease_ms = max(1, round(rules.lease_s * 1000))
        self._owner = uuid.uuid4().hex
        self._epoch = 0
        self._was_full = False

    # -- generators

    def lease(self, holder: str, count: int) -> Lease:
        """Lease no ticket while the server is out of memory."""
        try:
            version, limit, closed, ids, history = self._call(
                "lease", holder, count, self._lease_ms, uuid.uuid4().int, self._rules.max_deaths
            )
        except _StoreFull:
            return Lease(tickets=(), closed=False)
        tickets = tuple(
            Ticket(
                id=i,
                minimum_version=minimum_version(i, version=version, limit=limit, groups=self._rules.groups),
                history=History.parse(history.decode()),
            )
            for i in map(int, ids)
        )
        return Lease(tickets=tickets, closed=bool(closed))

    def renew(self, holder: str, ids: Iterable[int]) -> None:
        self._call("renew", holder, self._lease_ms, _text(ids))

    def put(self, holder: str, ticket_id: int, frame: bytes) -> PutOutcome:
        """Store a group, also from a holder whose lease has expired if no other holder has stored it.

        After the store was full, offer the frame before sending it, because the server logs refused frames.
        """
        try:
            size = (len(frame), self._rules.max_bytes)
            if self._was_full and self._call("offer", ticket_id, *size) == b"full":
                return PutOutcome.FULL
            reply = self._connection.call(lambda client: self._put(client, ticket_id, frame), tag=self._tag)
            outcome = PutOutcome(reply.decode())
        except _StoreFull:
            outcome = PutOutcome.FULL
        self._was_full = outcome is PutOutcome.FULL
        return outcome

    def give_back(self, holder: str, ids: Iterable[int]) -> None:
        self._call("give_back", holder, _text(ids))

    def fail(self, holder: str, ticket_id: int, reason: str, tombstone: bytes) -> bool:
        return bool(self._call("fail", holder, ticket_id, tombstone, self._rules.max_attempts))

    # -- the learner

    def recover(self, ledger: Ledger, *, version: int, limit: int, history: History = INITIAL) -> None:
        above = _text(sorted(ledger.above))
        state = (ledger.takes, ledger.chain, version, limit, ledger.watermark, above)
        known, is_first = self._epoch, int(not self._epoch)
        for _ in range(10):  # delayed calls of dead learners may recover in between
            learner = (known, self._owner, is_first)
            call = partial(self._reload_and_call, arguments=(*learner, *state, str(history), self._lease_ms))
            status, epoch = self._connection.call(call, tag=self._tag)
            if status == b"OK":
                self._epoch = epoch
                return
            known = epoch
        raise self._fenced(f"this learner recovered as epoch {self._epoch}, the store is at {epoch}")

    def take(self, ledger: Ledger, count: int, *, window: int) -> Take | None:
        number = ledger.takes + 1
        bounds = (min(count, MAX_COUNT), min(window, MAX_COUNT), self._rules.max_deaths)
        reply = self._learner("take", number, ledger.chain, *bounds)
        return _take(number, reply) if reply else None

    def frames(self, ids: Sequence[int]) -> list[bytes]:
        if not ids:
            return []
        keys = [str(i) for i in ids]
        frames: list[Any] = self._connection.call(lambda client: self._fetch(client, keys), tag=self._tag)
        missing = [i for i, frame in zip(ids, frames, strict=True) if frame is None]
        if missing:
            raise BufferGap(f"{self._where} has no frame of ids {missing}; recover")
        return [frame for frame in frames if frame is not None]

    def reject_frame(
        self, take: Take, ticket_id: int, frame: bytes, reason: str, *, final: bool = False, old: bool = False
    ) -> Take:
        most = "" if old else 0 if final else self._rules.max_attempts
        rejected = (ticket_id, sha1_of(frame), one_line(reason), most)
        return _take(take.number, self._learner("reject", take.number, take.chain, *rejected))

    def commit(self, number: int, chain: str) -> int:
        return int(self._learner("commit", number, chain)[0])

    def set_version(self, version: int, *, limit: int, waiting: bool = False) -> None:
        self._learner("version", version, limit, int(waiting))

    def revoke(self, holder: str) -> int:
        return int(self._call("revoke", holder))

    def dead_letters(self) -> list[DeadLetter]:
        texts = [letter.decode(errors="replace").partition(" ") for letter in self._call("letters")]
        return [DeadLetter(id=int(ticket_id), reason=reason) for ticket_id, _, reason in texts]

    def close(self) -> None:
        self._learner("close")

    def audit(self) -> Audit:
        *counts, names, counted = self._call("audit")
        places = ("issued", "leased", "reissue", "ready", "taken", "done", "payload_bytes")
        counters = {name.decode(): value for name, value in zip(names, counted, strict=True) if value}
        return Audit(**dict(zip(places, counts, strict=True)), counters=counters)

    # -- calls

    def _learner(self, function: str, *arguments: object) -> list[Any]:
        """Call a function of the learner. Returns the reply without its status, which is OK or WAIT."""
        reply: list[Any] = self._call(function, self._epoch, self._owner, *arguments)
        status, *reply = reply
        if status == b"FENCED":
            raise self._fenced(reply[0].decode())
        if status == b"GAP":
            raise BufferGap(f"{self._where}: {reply[0].decode()}; recover from the ledger")
        return reply

    def _fenced(self, found: str) -> BufferFenced:
        return BufferFenced(f"{self._where}: {found}; another learner has the run, this one must stop")

    def _call(self, function: str, *arguments: object) -> Any:
        return self._connection.call(lambda client: self._fcall(client, function, arguments), tag=self._tag)

    def _fcall(self, client: redis.Redis, function: str, arguments: tuple[object, ...]) -> Any:
        return self._loaded(client, lambda: self._request(client, function, arguments))

    def _reload_and_call(self, client: redis.Redis, arguments: tuple[object, ...]) -> Any:
        """Load the functions, as a bit flip in the server's log may have changed them, and call `recover`."""
        try:
            _load(client)
        except NoPermissionError:  # only generators wait for the learner
            raise
        except ResponseError as error:  # for example for lack of memory, which the recovery ends
            log.warning("%s keeps the functions that it has: %s", self._where, error)
        return self._fcall(client, "recover", arguments)

    def _put(self, client: redis.Redis, ticket_id: int, frame: bytes) -> Any:
        """Write and check a frame in one transaction, so that no unchecked frame is left."""
        with client.pipeline(transaction=True) as transaction:

            def request() -> Any:
                transaction.hsetnx(self._frames_key, str(ticket_id), frame)
                self._request(transaction, "put", (ticket_id, self._rules.max_bytes))
                return transaction.execute()[1]

            return self._loaded(client, request)

    def _fetch(self, client: redis.Redis, keys: list[str]) -> Any:
        try:
            return client.hmget(self._frames_key, keys)
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            raise BufferGap(f"{self._where}: the key of its frames has another type; recover") from error

    def _request(self, client: redis.Redis, function: str, arguments: tuple[object, ...]) -> Any:
        return client.fcall(f"asyncrl_{_DIGEST}_{function}", len(self._keys), *self._keys, *arguments)

    def _loaded(self, client: redis.Redis, request: Callable[[], Any]) -> Any:
        """Return the reply to `request`. Loads the functions if the server does not have them."""
        try:
            return request()
        except ResponseError as error:
            if isinstance(error, OutOfMemoryError) or reason(error).startswith("OOM"):
                raise _StoreFull(f"{self._where} is out of memory: {error}") from error
            if "WRONGTYPE" in str(error):
                raise _StoreFull(f"{self._where}: a key has another type: {error}") from error
            if "Function not found" not in str(error):
                raise
        try:
            _load(client)
        except NoPermissionError as error:
            # Generators may not load functions. The learner does, as it calls every second.
            raise BusyLoadingError("the learner has not loaded its functions into this store yet") from error
        return request()


class _StoreFull(StoreError):
    """The server is out of memory, or a key has a wrong type. PUT and LEASE wait until that is over."""


def _load(client: redis.Redis) -> None:
    client.function_load(LIBRARY, replace=True)


def _take(number: int, reply: list[Any]) -> Take:
    chain, ids = reply
    return Take(number=number, ids=tuple(map(int, ids)), chain=chain.decode())


def _text(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))
