"""Many seeds on all cores, and what they have seen."""

import logging
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from asyncrl.hosting.processes import die_with_parent

from .world import simulate

SEEDS_AT_ONCE = 20
SIMULATES = (
    "the same, histories, several ranks, the control plane, tickets and steps that kill, faults in storms"
)
"""What earlier campaigns did not: seeds of another simulation are told apart by it."""
MOST_TRACES = 5
"""Failures that are told in full."""


@dataclass(slots=True)
class Tally:
    """What some seeds have seen."""

    seeds: int = 0
    calls: int = 0
    simulated_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    shards: Counter[int] = field(default_factory=Counter)
    """How many of them had how many."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """"FUNCTION: KIND" of every reply."""
    failures: dict[int, str] = field(default_factory=dict)
    """seed -> why"""

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.calls += other.calls
        self.simulated_s += other.simulated_s
        self.faults.update(other.faults)
        self.shards.update(other.shards)
        self.outcomes.update(other.outcomes)
        self.failures.update(other.failures)

    def told(self) -> str:
        """The failures, each with the command that shows it again."""
        lines = [f"{len(self.failures)} of {self.seeds} seeds failed"]
        for number, (seed, why) in enumerate(sorted(self.failures.items())):
            lines += [f"seed {seed}; replay it with: python -m reliability.simulation {seed}"]
            lines += [why] if number < MOST_TRACES else [why.rstrip().splitlines()[-1]]
        return "\n".join(lines)


def simulate_all(first: int, count: int) -> Tally:
    """Seeds `first` to `first + count - 1`, one after the other."""
    tally = Tally(seeds=count)
    logging.disable(logging.CRITICAL)
    for seed in range(first, first + count):
        try:
            world = simulate(seed)
        except Exception:  # noqa: BLE001 - whatever broke, the seed has failed
            tally.failures[seed] = traceback.format_exc()
            continue
        tally.calls += world.store.calls
        tally.simulated_s += world.engine.now_s
        tally.faults.update(world.faults.struck)
        tally.shards[world.scenario.shards] += 1
        tally.outcomes.update(world.outcomes)
    return tally


def campaign(first: int, count: int) -> Iterator[Tally]:
    """The same on all cores: a tally of some seeds whenever it is there."""
    starts = range(first, first + count, SEEDS_AT_ONCE)
    # Not forked: the parent may have threads.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        os.cpu_count(), spawn, initializer=die_with_parent, initargs=(os.getpid(),)
    ) as pool:
        parts = [
            pool.submit(simulate_all, start, min(SEEDS_AT_ONCE, first + count - start)) for start in starts
        ]
        for part in as_completed(parts):
            yield part.result()
