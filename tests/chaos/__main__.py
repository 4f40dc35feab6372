"""`python -m tests.chaos [--minutes M] [--seed S] [--only NAMES] [--out FILE]`: faults on real processes, and what they cost.

NAMES, separated by commas: scenarios of tests/chaos/faults.py, by default all; `designs`: other designs under the same faults;
`real`: a whole run with a model. What was not run keeps its figures in FILE. The exit status is the number of runs that broke a
promise.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.environment import describe

from .faults import SCENARIOS, Scenario, strike
from .outcome import outcome, table
from .world import World


def run(scenario: Scenario, seed: int, seconds: float, directory: Path) -> dict[str, Any]:
    """One scenario from start to verdict. Raises Stuck."""
    with World(directory, seed, fsync=scenario.fsync) as world:
        world.start()
        started_s = time.monotonic()
        strike(world, scenario, seed, seconds)
        return outcome(world, scenario.name, time.monotonic() - started_s, world.finish())


def main() -> int:
    """Run what was asked for, print the tables, keep the numbers."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="of faults, over all scenarios")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(scenario.name for scenario in SCENARIOS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    chosen = arguments.only.split(",")
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in chosen]
    found: dict[str, Any] = {}
    root = Path(tempfile.mkdtemp(prefix="asyncrl-chaos-"))
    if scenarios:
        found["volume"] = {"seed": arguments.seed, "environment": describe(), "runs": []}
    for scenario in scenarios:
        seconds = 60.0 * arguments.minutes * scenario.share / sum(each.share for each in scenarios)
        result = run(scenario, arguments.seed, seconds, root / scenario.name)
        found["volume"]["runs"].append(result)
        say(f"{scenario.name}: { ({key: value for key, value in result.items() if key != 'recoveries_s'}) }")
        if not (result["lost"] or result["duplicated"] or result["wrong"]):
            shutil.rmtree(root / scenario.name)
    if scenarios:
        say("\n".join(table(found["volume"]["runs"])))
    if arguments.out:
        kept = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        arguments.out.write_text(json.dumps(kept | found, indent=1) + "\n")
    bad = [one for one in found["volume"]["runs"] if one["lost"] or one["duplicated"] or one["wrong"]]
    if bad:
        say(f"broken promises; what the runs left is in {root}")
    return len(bad)


def say(text: str) -> None:
    """To the terminal, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
