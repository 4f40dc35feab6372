"""Which source a ticket takes its row from: exact shares, from the number of the ticket alone.

After any number of tickets each source had as many as its share says, to less than one ticket. From this and
the share follows a first and a last ticket that may be the j-th of a source. Of the sources whose next ticket
may come, the one whose last possible ticket is nearest gets it. Tijdeman (1980, "The chairman assignment
problem") proved that this always succeeds, with a distance of at most 1 - 1 / (2k - 2) for k sources. The
choice must never change, because runs are resumed with it.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from math import ceil, lcm

from asyncrl.config.data_section import DataConfig
from asyncrl.data.sample_plan import SamplePlan, rows_of


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
