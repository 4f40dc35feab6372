"""Simulate one seed, or many on all cores: `python -m reliability.simulation FIRST [COUNT]`.

The exit status is 1 when an invariant broke. Every night: `python -m reliability.simulation $(date
+%y%m%d)000000 100000`, other seeds each time. With `--out FILE` what the seeds have seen joins what others
have, for the table of docs/reliability.md.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from bench.environment import describe

from .campaign import SIMULATES, Tally, campaign, simulate_all

REPORT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m reliability.simulation")
    parser.add_argument("first", type=int, help="seed")
    parser.add_argument("count", type=int, nargs="?", default=1, help="of seeds")
    parser.add_argument(
        "--out", type=Path, help="JSON; its campaigns stay, but one that started at the same seed"
    )
    arguments = parser.parse_args()
    first, count = arguments.first, arguments.count
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
    print(
        f"{total.seeds / seconds:.1f} seeds/s, {total.simulated_s / 3600:.1f} simulated hours, "
        f"{total.calls} calls"
    )
    print(f"shards: {dict(sorted(total.shards.items()))}")
    print(f"faults: {dict(total.faults.most_common())}\nresults: {dict(total.outcomes.most_common())}")
    if arguments.out:
        keep(arguments.out, first, total)
    return bool(total.failures)


def keep(path: Path, first: int, total: Tally) -> None:
    """Add a campaign to those of the file."""
    before = json.loads(path.read_text())["campaigns"] if path.exists() else []
    # Not asdict(), which cannot copy a Counter.
    seen = {field.name: getattr(total, field.name) for field in dataclasses.fields(total)}
    others = [run for run in before if (run["simulates"], run["first"]) != (SIMULATES, first)]
    runs = [*others, {"first": first, "simulates": SIMULATES} | seen]
    lines = ",\n".join(f"  {json.dumps(run)}" for run in sorted(runs, key=lambda run: run["first"]))
    path.write_text(
        f'{{\n "environment": {json.dumps(describe("lupa"))},\n "campaigns": [\n{lines}\n ]\n}}\n'
    )


if __name__ == "__main__":
    sys.exit(main())
