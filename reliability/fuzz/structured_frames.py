"""Many mutants of what the learner decodes, quickly and without looking at coverage, which
reliability/fuzz/fuzz_frames.py does.

    python -m reliability.fuzz.structured_frames --cases 5000000 --seed 1 --json
    bench/results/faults_frames.json

The first exception that is no WireError ends it, with the case in hexadecimal. Runs of other seeds keep their
place in the file.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from bench.environment import describe

from .frame_cases import Seen, check, mutants


def fuzz(seed: int, cases: int) -> dict[str, Any]:
    """Decode that many mutants. Raises AssertionError with the first that is neither refused nor in order."""
    seen, started_s, before_kib = Seen(), time.process_time(), _peak_kib()
    for case in mutants(seed, cases):
        try:
            check(case, seen)
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case.hex()}") from error
    return {
        "seed": seed,
        "cases": cases,
        "decoded": seen.accepted,
        "refused": seen.refused,
        "cpu_seconds": round(time.process_time() - started_s, 1),
        "peak_growth_mib": round((_peak_kib() - before_kib) / 1024, 1),
    }


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m reliability.fuzz.structured_frames", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = fuzz(arguments.seed, arguments.cases)
    sys.stdout.write(json.dumps(result) + "\n")
    if arguments.json:
        found = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        others = [one for one in found.get("structured", {}).get("runs", []) if one["seed"] != arguments.seed]
        found["structured"] = {"environment": describe(), "runs": [*others, result]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
