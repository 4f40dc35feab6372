"""Run one seed, or many."""

import logging
import sys
import time
import traceback

from .world import simulate


def main() -> int:
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    logging.disable(logging.CRITICAL)
    bad = 0
    start = time.perf_counter()
    totals: dict = {}
    for seed in range(first, first + count):
        try:
            world = simulate(seed)
            totals["s"] = totals.get("s", 0) + world.engine.now_s
            totals["calls"] = totals.get("calls", 0) + world.store.calls
            totals["events"] = totals.get("events", 0) + world.engine._count
            for k, v in world.faults.struck.items():
                totals[k] = totals.get(k, 0) + v
        except Exception as error:
            bad += 1
            print(seed, type(error).__name__, str(error)[:300], flush=True)
            if count == 1:
                traceback.print_exc()
            if bad > 10:
                break
    print(bad, "bad", (seed - first + 1) / (time.perf_counter() - start), "seeds/s", totals)
    return bad


if __name__ == "__main__":
    sys.exit(main())
