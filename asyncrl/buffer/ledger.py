"""The learner's own record of what is in the weights. It is saved inside the checkpoint and wins over the store."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from asyncrl.errors import CheckpointError

EMPTY_CHAIN = "0" * 40


def next_chain(chain: str, ids: tuple[int, ...]) -> str:
    """chain[n] = sha1(chain[n-1] + " " + ids): what the store computes too, so histories can be compared."""
    return sha1_of(f"{chain} {' '.join(map(str, ids))}".encode())


def sha1_of(data: bytes) -> str:
    """The one hash that the store offers to its functions; nobody is kept out by it."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Every id consumed so far, as a watermark and the ids above it; O(in flight), never O(run)."""

    # All ids up to here are consumed.
    watermark: int = 0
    above: set[int] = field(default_factory=set)
    takes: int = 0
    chain: str = EMPTY_CHAIN
    # Groups whose effect is in the weights.
    trained: int = 0
    # Groups consumed but not trained, by reason; each gave its credit back.
    rejected: dict[str, int] = field(default_factory=dict)

    def consume(self, ids: tuple[int, ...]) -> None:
        """Enter the ids of one take and extend the chain. Entering an id twice is refused."""
        repeated = [i for i in ids if i <= self.watermark or i in self.above]
        if repeated or len(set(ids)) != len(ids):
            raise CheckpointError(f"take {self.takes + 1} repeats ids {repeated or ids}; the store and the ledger disagree")
        self.above.update(ids)
        while self.watermark + 1 in self.above:
            self.watermark += 1
            self.above.discard(self.watermark)
        self.takes += 1
        self.chain = next_chain(self.chain, ids)

    def count_rejected(self, reason: str, groups: int = 1) -> None:
        """Book consumed groups as not trained."""
        self.rejected[reason] = self.rejected.get(reason, 0) + groups

    @property
    def consumed(self) -> int:
        """Ids consumed: watermark plus those above it."""
        return self.watermark + len(self.above)

    @property
    def total_rejected(self) -> int:
        """Consumed but not trained, over all reasons."""
        return sum(self.rejected.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint's JSON."""
        return {
            "watermark": self.watermark,
            "above": sorted(self.above),
            "takes": self.takes,
            "chain": self.chain,
            "trained": self.trained,
            "rejected": dict(self.rejected),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return cls(**{**values, "above": set(values["above"]), "rejected": dict(values["rejected"])})
