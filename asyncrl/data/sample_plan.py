"""The sample plan: which row a ticket stands for. Pure arithmetic, the same in every process, for ever.

Tickets 1, 2, 3, ... run through the dataset epoch after epoch; a shuffled epoch is a keyed pseudo-random permutation
of the rows. The permutation is computed, not stored: a Feistel network on the smallest square power of two that
holds all rows, walked along its cycle until it lands inside the dataset. BLAKE2b is its round function, so the
plan depends on no library's random numbers and may never change between releases (a run resumes with it).
"""

import hashlib
from typing import NamedTuple

from asyncrl.errors import DataError

# Four pass for random on large domains (Luby and Rackoff 1988); with a handful of rows a test sees a bias
# below eight.
ROUNDS = 8


class PlanEntry(NamedTuple):
    """What one ticket stands for."""

    # From 0.
    epoch: int
    # Index into the dataset, from 0.
    row: int


class SamplePlan:
    """Infinite, deterministic order of the rows of one dataset."""

    def __init__(self, size: int, *, seed: int, shuffle: bool) -> None:
        """
        Args:
            size: rows of the dataset; at least 1.
            seed: fixes the order of every epoch.
            shuffle: False: the order of the file.
        """
        if size < 1:
            raise DataError(f"the sample plan needs a dataset of at least 1 row, got {size}")
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)

    def at(self, ticket_id: int) -> PlanEntry:
        """Epoch and row of a ticket; ids are from 1."""
        if ticket_id < 1:
            raise ValueError(f"ticket ids are from 1, got {ticket_id}")
        epoch, position = divmod(ticket_id - 1, self.size)
        return PlanEntry(epoch, self._permute(epoch, position) if self._shuffle else position)

    def _permute(self, epoch: int, position: int) -> int:
        key = f"{self._seed}:{epoch}".encode()
        while (position := self._feistel(key, position)) >= self.size:
            pass  # outside the dataset: on along the cycle, which leads back inside (the domain is < 4 times the dataset)
        return position

    def _feistel(self, key: bytes, value: int) -> int:
        """A bijection of [0, 4 ** half_bits)."""
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for number in range(ROUNDS):
            digest = hashlib.blake2b(b"%s:%d:%d" % (key, number, right), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        return (left << self._half_bits) | right
