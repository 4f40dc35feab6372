"""A lane in S > 1 shards for the nodes of a cluster. Each shard is a complete lane with its own hash tag.

Shard s = (id - 1) mod S has the ids s + 1, s + 1 + S, ..., and numbers them 1, 2, ... The learner takes B / S
groups of every step from each shard, with a window of W / S and the credit of B / S. So the proof of the
staleness bound holds unchanged for each shard, and no call spans two shards.

Shards share generators. A generator that keeps a group for a full shard leases from no shard, which could
block the step forever (simulation found it). So while the step waits for one shard, the shards that have
given their part accept their oldest unfinished group despite the byte cap.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.buffer.base import Audit, Buffer, DeadLetter, Lease, PutOutcome
from asyncrl.buffer.intake import Collected, Intake
from asyncrl.buffer.ledger import Ledger
from asyncrl.errors import ConfigError
from asyncrl.types import Ticket


def shard_names(lane: str, shards: int) -> list[str]:
    """Return the names of the shards as lanes of the store; a single shard has the lane's name.

    They differ only in the last character, so four consecutive shards are in the four quarters of a cluster.
    """
    return [lane] if shards == 1 else [f"{lane}-of-{shards}-{shard}" for shard in range(shards)]


def split(ticket_id: int, shards: int) -> tuple[int, int]:
    """Return the shard of a ticket and the ticket's id in that shard."""
    above, shard = divmod(ticket_id - 1, shards)
    return shard, above + 1


def join(shard: int, local_id: int, shards: int) -> int:
    """The inverse of `split`."""
    return (local_id - 1) * shards + shard + 1


def ledgers_of(saved: Mapping[str, Any], shards: int) -> tuple[Ledger, ...]:
    """Return one ledger per shard from a checkpoint, or new ones. Raises ConfigError for another `shards`."""
    if not saved:
        return tuple(Ledger() for _ in range(shards))
    found = saved.get("shards", [saved])
    if len(found) != shards:
        raise ConfigError(
            f"the checkpoint was made with store.shards: {len(found)}, the config says {shards}, with which "
            f"an id would be another ticket: set store.shards: {len(found)}, or begin a new run"
        )
    return tuple(map(Ledger.from_dict, found))


class ShardedBuffer:
    """All shards as one buffer, for generators and audits; `Buffer` has the contract."""

    def __init__(self, shards: Sequence[Buffer]) -> None:
        self.shards = tuple(shards)
        # The shard of the next lease rotates, so that no shard is always served last.
        self._next = 0

    # -- generators

    def lease(self, holder: str, count: int) -> Lease:
        """Lease up to `count` tickets, from one shard after the other."""
        tickets: list[Ticket] = []
        closed, shards = False, len(self.shards)
        for shard in (*range(self._next, shards), *range(self._next)):
            lease = self.shards[shard].lease(holder, count - len(tickets))
            tickets += [replace(ticket, id=join(shard, ticket.id, shards)) for ticket in lease.tickets]
            closed = closed or lease.closed
            if len(tickets) == count:
                break
        self._next = (shard + 1) % shards
        return Lease(tickets=tuple(tickets), closed=closed)

    def renew(self, holder: str, ids: Iterable[int]) -> None:
        for shard, local_ids in self._by_shard(ids).items():
            self.shards[shard].renew(holder, local_ids)

    def put(self, holder: str, ticket_id: int, frame: bytes) -> PutOutcome:
        shard, local_id = split(ticket_id, len(self.shards))
        return self.shards[shard].put(holder, local_id, frame)

    def give_back(self, holder: str, ids: Iterable[int]) -> None:
        for shard, local_ids in self._by_shard(ids).items():
            self.shards[shard].give_back(holder, local_ids)

    def fail(self, holder: str, ticket_id: int, reason: str, tombstone: bytes) -> bool:
        shard, local_id = split(ticket_id, len(self.shards))
        return self.shards[shard].fail(holder, local_id, reason, tombstone)

    # -- the learner

    def revoke(self, holder: str) -> int:
        return sum(shard.revoke(holder) for shard in self.shards)

    def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters of every shard, with the ids of the lane."""
        return [
            DeadLetter(id=join(shard, letter.id, len(self.shards)), reason=letter.reason)
            for shard, buffer in enumerate(self.shards)
            for letter in buffer.dead_letters()
        ]

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def audit(self) -> Audit:
        """Return the sums over all shards."""
        audits = [shard.audit() for shard in self.shards]
        names = ("issued", "leased", "reissue", "ready", "taken", "done", "payload_bytes")
        counters: Counter[str] = Counter()
        for audit in audits:
            counters.update(audit.counters)
        return Audit(
            **{name: sum(getattr(audit, name) for audit in audits) for name in names}, counters=dict(counters)
        )

    def _by_shard(self, ids: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for ticket_id in ids:
            shard, local_id = split(ticket_id, len(self.shards))
            found[shard].append(local_id)
        return found


@dataclass(slots=True)
class ShardedIntake:
    """One intake per shard. A step is complete when every shard has given its part of the groups."""

    intakes: tuple[Intake, ...]
    _parts: list[Collected | None] = field(init=False)
    # The ledgers after the last whole step, for `ledgers_of`; after a restart, later parts are taken again.
    settled: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._parts = [None] * len(self.intakes)
        self.settled = self._ledgers()

    def recover(self, version: int) -> None:
        for intake in self.intakes:
            intake.recover(version)

    def open(self, version: int) -> None:
        for intake in self.intakes:
            intake.open(version)

    def poll(self, version: int, *, wait_s: float) -> Collected | None:
        """Return the groups of the step of `version`, or None if some are missing after `wait_s`."""
        until_s = time.monotonic() + wait_s
        for shard, intake in enumerate(self.intakes):
            if self._parts[shard] is None:
                self._parts[shard] = intake.poll(version, wait_s=max(0.0, until_s - time.monotonic()))
        parts = [part for part in self._parts if part is not None]
        if len(parts) < len(self.intakes):
            for intake, part in zip(self.intakes, self._parts, strict=True):
                if part is not None:
                    intake.open(version, waiting=True)
            return None
        self._parts = [None] * len(self.intakes)
        self.settled = self._ledgers()
        whole = Collected()
        for part in parts:
            whole.groups += part.groups
            whole.rejected += part.rejected
            whole.takes += part.takes
            whole.taken_at |= part.taken_at
            whole.frames += part.frames
        return whole

    def commit(self, saved: Mapping[str, Any], version: int) -> None:
        for intake, ledger in zip(self.intakes, saved["shards"], strict=True):
            intake.commit(ledger, version)

    def _ledgers(self) -> dict[str, Any]:
        return {"shards": [intake.settled for intake in self.intakes]}
