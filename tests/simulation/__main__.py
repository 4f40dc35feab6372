"""Simulate one seed, or many on all cores: `python -m tests.simulation FIRST [COUNT]`; exit status 1 when an invariant broke.

Every night: `python -m tests.simulation $(date +%y%m%d)000000 100000`, other seeds each time.
"""

import sys
import time

from .campaign import Tally, campaign, simulate_all

REPORT_S = 60.0


def main() -> int:
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    total, started_s, told_s = Tally(), time.perf_counter(), time.perf_counter()
    for part in [simulate_all(first, 1)] if count == 1 else campaign(first, count):
        total.add(part)
        if part.failures:
            print(part.told(), flush=True)
        if time.perf_counter() > told_s + REPORT_S:
            told_s = time.perf_counter()
            print(f"{total.seeds} of {count} seeds, {len(total.failures)} failed", flush=True)
    seconds = time.perf_counter() - started_s
    print(total.told())
    print(f"{total.seeds / seconds:.1f} seeds/s, {total.simulated_s / 3600:.1f} simulated hours, {total.calls} calls")
    print(f"shards: {dict(sorted(total.shards.items()))}")
    print(f"faults: {dict(total.faults.most_common())}\nresults: {dict(total.outcomes.most_common())}")
    return bool(total.failures)


if __name__ == "__main__":
    sys.exit(main())
