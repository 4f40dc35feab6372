"""The sample plan: the row of every ticket. Pure arithmetic with the same result in every process.

Tickets 1, 2, 3, ... run through the dataset epoch after epoch; a shuffled epoch is a keyed pseudo-random
permutation of the rows. The permutation is computed, not stored: a Feistel network on the smallest square
power of two that is at least the number of rows, repeated until the result is inside the dataset. Its round
function is BLAKE2b, so the plan depends on no library's random numbers. It must never change, because runs
are resumed with it.

A curriculum lets an epoch skip rows. The epoch keeps its number of tickets: a fixed share of them, the floor,
tries skipped rows again, and the others go through the rows that are kept. docs/planes/sampling.md says who
decides what is skipped.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import DataError

# Four suffice for large domains (Luby and Rackoff 1988); with few rows a test detects a bias below eight.
ROUNDS = 8
# The floor is counted in whole millionths: all processes round alike.
MILLION = 1_000_000


class SamplePlan:
    """Infinite, deterministic order of the rows of one dataset."""

    def __init__(self, size: int, *, seed: int, shuffle: bool, floor: float = 0.0) -> None:
        """`seed` determines the order of every epoch; `shuffle=False` keeps the order of the file.

        `floor` is the share of tickets that try skipped rows again.
        """
        if size < 1:
            raise DataError(f"the sample plan needs a dataset of at least 1 row, got {size}")
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._floor = round(floor * MILLION)
        # Epoch -> the rows that it keeps, and those that it skips; an epoch without an entry keeps all.
        self._rows: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def skip(self, skipped: Mapping[int, NDArray[np.bool_]]) -> None:
        """Set the rows that each epoch skips, as a mask over all rows; every other epoch skips none."""
        self._rows = {
            epoch: (np.flatnonzero(~mask), np.flatnonzero(mask))
            for epoch, mask in skipped.items()
            if mask.any()
        }

    def row(self, ticket_id: int) -> int:
        """Return the index of a ticket's row in the dataset, from 0; ids are from 1."""
        if ticket_id < 1:
            raise ValueError(f"ticket ids are from 1, got {ticket_id}")
        epoch, position = divmod(ticket_id - 1, self.size)
        key = f"{self._seed}:{epoch}"
        if epoch not in self._rows:
            return self._permuted(key, position, self.size)
        rows, skipped = self._rows[epoch]
        retries = self._retries(ticket_id - 1)
        if not len(rows) or self._retries(ticket_id) > retries:
            # Counted over all epochs, so that every skipped row has its turn.
            key, turn, rows = f"{self._seed}:retry", retries if len(rows) else ticket_id - 1, skipped
        else:
            turn = position - (retries - self._retries(epoch * self.size))
        lap, place = divmod(turn, len(rows))
        return int(rows[self._permuted(f"{key}:{lap}", place, len(rows))])

    def _retries(self, ticket_id: int) -> int:
        """Return how many tickets up to this one try a skipped row, in epochs that have both kinds."""
        return ticket_id * self._floor // MILLION

    def _permuted(self, key: str, position: int, size: int) -> int:
        """Return the place of a position below `size` in the order of `key`."""
        if not self._shuffle:
            return position
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        # A cycle that starts inside leads back inside; the domain is < 4 times the size.
        while (position := _feistel(key.encode(), position, half_bits)) >= size:
            pass
        return position


def rows_of(packed: bytes, size: int) -> NDArray[np.bool_]:
    """Return the mask over `size` rows that was packed to bits."""
    return np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=size).astype(bool)


def _feistel(key: bytes, value: int, half_bits: int) -> int:
    """Map [0, 4 ** half_bits) to itself, one to one."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(ROUNDS):
        digest = hashlib.blake2b(b"%s:%d:%d" % (key, number, right), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return (left << half_bits) | right
