"""The learner's record of consumed groups. Checkpoints contain it, and it overrides the store."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from asyncrl.errors import CheckpointError

EMPTY_CHAIN = "0" * 40


def next_chain(chain: str, ids: tuple[int, ...]) -> str:
    """chain[n] = sha1(chain[n-1] + " " + ids). The store computes the same chain for comparison."""
    return sha1_of(f"{chain} {' '.join(map(str, ids))}".encode())


def sha1_of(data: bytes) -> str:
    """SHA-1 in hex: the only hash that a store's functions have. It is not used for security."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Every consumed id, as a watermark up to which all are consumed, and the ids above it."""

    watermark: int = 0
    above: set[int] = field(default_factory=set)
    takes: int = 0
    chain: str = EMPTY_CHAIN
    # Groups that the weights were trained on.
    trained: int = 0
    # Groups consumed but not trained, by kind of reason; each raised the credit by one.
    rejected: dict[str, int] = field(default_factory=dict)

    def consume(self, ids: tuple[int, ...]) -> None:
        """Enter the ids of one take and extend the chain. Raises CheckpointError for a repeated id."""
        repeated = [i for i in ids if i <= self.watermark or i in self.above]
        if repeated or len(set(ids)) != len(ids):
            raise CheckpointError(
                f"take {self.takes + 1} repeats ids {repeated or ids}; the store and the ledger disagree"
            )
        self.above.update(ids)
        while self.watermark + 1 in self.above:
            self.watermark += 1
            self.above.discard(self.watermark)
        self.takes += 1
        self.chain = next_chain(self.chain, ids)

    def count_rejected(self, reason: str, groups: int = 1) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + groups

    @property
    def consumed(self) -> int:
        return self.watermark + len(self.above)

    @property
    def total_rejected(self) -> int:
        return sum(self.rejected.values())

    def to_dict(self) -> dict[str, Any]:
        values = {known.name: getattr(self, known.name) for known in fields(Ledger)}
        return values | {"above": sorted(self.above), "rejected": dict(self.rejected)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return cls(**{**values, "above": set(values["above"]), "rejected": dict(values["rejected"])})
