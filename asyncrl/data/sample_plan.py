"""The sample plan: the row of every ticket. Pure arithmetic with the same result in every process.

Tickets 1, 2, 3, ... run through the dataset epoch after epoch; a shuffled epoch is a keyed pseudo-random
permutation of the rows. The permutation is computed, not stored: a Feistel network on the smallest square
power of two that is at least the number of rows, repeated until the result is inside the dataset. Its round
function is BLAKE2b, so the plan depends on no library's random numbers. It must never change, because runs
are resumed with it.
"""

import hashlib
from typing import NamedTuple

from asyncrl.errors import DataError

# Four suffice for large domains (Luby and Rackoff 1988); with few rows a test detects a bias below eight.
ROUNDS = 8


class PlanEntry(NamedTuple):
    """The epoch of a ticket and the index of its row in the dataset, both from 0."""

    epoch: int
    row: int


class SamplePlan:
    """Infinite, deterministic order of the rows of one dataset."""

    def __init__(self, size: int, *, seed: int, shuffle: bool) -> None:
        """`seed` determines the order of every epoch; `shuffle=False` keeps the order of the file."""
        if size < 1:
            raise DataError(f"the sample plan needs a dataset of at least 1 row, got {size}")
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)

    def at(self, ticket_id: int) -> PlanEntry:
        """Return epoch and row of a ticket; ids are from 1."""
        if ticket_id < 1:
            raise ValueError(f"ticket ids are from 1, got {ticket_id}")
        epoch, position = divmod(ticket_id - 1, self.size)
        if self._shuffle:
            key = f"{self._seed}:{epoch}".encode()
            # A cycle that starts inside the dataset leads back inside; the domain is < 4 times the dataset.
            while (position := self._feistel(key, position)) >= self.size:
                pass
        return PlanEntry(epoch, position)

    def _feistel(self, key: bytes, value: int) -> int:
        """Map [0, 4 ** half_bits) to itself, one to one."""
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for number in range(ROUNDS):
            digest = hashlib.blake2b(b"%s:%d:%d" % (key, number, right), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        return (left << self._half_bits) | right
