"""Simulate one seed, or many: `python -m tests.simulation FIRST [COUNT]`. Seeds whose invariants do not hold are printed."""

import logging
import sys
import time
import traceback
from collections import Counter

from .violation import Violation
from .world import simulate

MOST_FAILURES = 10


def main() -> int:
    """The number of seeds that failed."""
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    logging.disable(logging.CRITICAL)
    failed, totals, started_s = 0, Counter[str](), time.perf_counter()
    for seed in range(first, first + count):
        try:
            world = simulate(seed)
            totals.update(world.faults.struck)
            totals["calls"] += world.store.calls
        except (Violation, AssertionError):
            failed += 1
            sys.stdout.write(f"seed {seed}: {traceback.format_exc(limit=0 if count > 1 else None)}\n")
            if failed > MOST_FAILURES:
                break
    done = seed - first + 1
    speed = done / (time.perf_counter() - started_s)
    sys.stdout.write(f"{failed} of {done} seeds failed, {speed:.1f} seeds/s, {dict(totals)}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
