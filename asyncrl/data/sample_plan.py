"""The sample plan: the row of every ticket. Pure arithmetic with the same result in every process.

Tickets 1, 2, 3, ... run through the dataset epoch after epoch; a shuffled epoch is a keyed pseudo-random
permutation of the rows. The permutation is computed, not stored: a Feistel network on the smallest square
power of two that is at least the number of rows, repeated until the result is inside the dataset. Its round
function is BLAKE2b, so the plan depends on no library's random numbers. It must never change, because runs
are resumed with it.

A ticket takes its row from one of several sources, by exact shares and its number alone. After any number of
tickets each source had as many as its share says, to less than one ticket. From this and the share follows a
first and a last ticket that may be the j-th of a source. Of the sources whose next ticket may come, the one
whose last possible ticket is nearest gets it. Tijdeman (1980, "The chairman assignment problem") proved that
this always succeeds, with a distance of at most 1 - 1 / (2k - 2) for k sources. It must never change, either.

A curriculum lets an epoch skip rows. The epoch keeps its number of tickets: a fixed share of them, the floor,
tries skipped rows again, and the others go through the rows that are kept. docs/planes/sampling.md says who
decides what is skipped.
"""

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from math import ceil, lcm

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.data_section import DataConfig
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


class Shares:
    """The source of every ticket."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        """`shares` are above 0 and sum to 1."""
        self.shares = shares
        # The choice repeats after so many tickets, of which each source has a whole number.
        self._period = lcm(*(share.denominator for share in shares))
        self._parts = 2 * len(shares) - 2 or 1  # the distance is at most 1 - 1 / parts
        self._chosen = array("H")  # source of the tickets of the first period, as far as they were needed
        self._tickets = [array("q") for _ in shares]  # of each source, in this period, from 1
        self._windows = [self._window(source) for source in range(len(shares))]

    def source(self, ticket_id: int) -> int:
        """Return the index of the ticket's source."""
        place = (ticket_id - 1) % self._period
        self._choose(place + 1)
        return self._chosen[place]

    def count(self, source: int, ticket_id: int) -> int:
        """Return how many tickets of the source there are up to this one."""
        periods, place = divmod(ticket_id, self._period)
        self._choose(place)
        whole = int(periods * self._period * self.shares[source])
        return whole + bisect_right(self._tickets[source], place)

    def most(self, source: int, tickets: int) -> int:
        """Return a bound on the tickets of the source among so many that follow each other."""
        share = self.shares[source]
        return tickets if share == 1 else ceil(tickets * share) + 1

    def _choose(self, last: int) -> None:
        for ticket_id in range(len(self._chosen) + 1, last + 1):
            _, source = min(
                (due, source) for source, (first, due) in enumerate(self._windows) if first <= ticket_id
            )
            self._chosen.append(source)
            self._tickets[source].append(ticket_id)
            self._windows[source] = self._window(source)

    def _window(self, source: int) -> tuple[int, int]:
        """Return the first ticket that may be the next one of the source, and the last one."""
        share, had = self.shares[source], len(self._tickets[source]) * self._parts
        # (j + 1 / parts) / share, rounded up, and (j + 1 - 1 / parts) / share, rounded down.
        above, below = share.denominator, share.numerator * self._parts
        return -(-(had + 1) * above // below), (had + self._parts - 1) * above // below + 1


class Mixture:
    """The row of every ticket, among the rows of all sources one after the other."""

    def __init__(self, shares: Shares, plans: Sequence[SamplePlan]) -> None:
        """Each source has its plan, whose tickets are those of the source, counted from 1."""
        self.shares, self.plans = shares, plans
        self._firsts = [*accumulate((plan.size for plan in plans), initial=0)]

    def turn(self, ticket_id: int) -> tuple[int, int]:
        """Return the source of the ticket, and how many tickets of it there are up to this one."""
        source = self.shares.source(ticket_id)
        return source, self.shares.count(source, ticket_id)

    def row(self, ticket_id: int) -> int:
        """Return the index of the ticket's row."""
        source, number = self.turn(ticket_id)
        return self._firsts[source] + self.plans[source].row(number)

    def skip(self, skipped: Mapping[str, bytes]) -> None:
        """Let epochs of sources skip rows: `Curricula.decide`."""
        for source, plan in enumerate(self.plans):
            epochs = {
                key.partition(":")[2]: rows for key, rows in skipped.items() if key.startswith(f"{source}:")
            }
            plan.skip({int(epoch): rows_of(packed, plan.size) for epoch, packed in epochs.items()})


def make_mixture(data: DataConfig, sizes: Sequence[int], *, seed: int) -> Mixture:
    """Return the plan of data.train, whose sources have so many rows; it skips none yet."""
    floor = data.curriculum.floor or 0.0
    plans = [SamplePlan(size, seed=seed, shuffle=data.shuffle, floor=floor) for size in sizes]
    return Mixture(Shares(data.shares), plans)
