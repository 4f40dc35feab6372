"""Faults on real processes, and their cost: `python -m reliability.chaos [--minutes M] [--seed S] [--only
NAMES] [--out FILE]`.

NAMES, separated by commas: scenarios of reliability/chaos/faults.py, by default all; `hardening`: all kinds
of faults in one run; `episodes`: a run with environments and agents; `designs`: other designs under the same
faults; `real`: a whole run with a model; `pace`: another, with few faults; `real_hangs`: another, whose
processes are stopped. What was not run keeps its figures in FILE. The exit status is the number of runs that
broke a promise.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.environment import describe

from . import designs
from .episodes import EPISODES
from .faults import SCENARIOS, Scenario, strike
from .hardening import HARDENING
from .lineage import Verdict
from .members import Stuck
from .outcome import outcome, table


def run(scenario: Scenario, seed: int, seconds: float, directory: Path) -> dict[str, Any]:
    """One scenario from start to verdict; a run that does not go on has broken a promise too."""
    with scenario.world(
        directory, seed, fsync=scenario.fsync, is_spread=scenario.is_spread, hang_s=scenario.hang_s
    ) as world:
        started_s = time.monotonic()
        try:
            world.start()
            started_s = time.monotonic()
            strike(world, scenario, seed, seconds)
            struck_s = time.monotonic() - started_s
            verdict = world.finish()
        except Stuck as stuck:
            struck_s, verdict = time.monotonic() - started_s, Verdict.stuck(str(stuck))
        return outcome(world, scenario, struck_s, verdict)


def main() -> int:
    """Run what was asked for, print the tables, keep the numbers."""
    parser = argparse.ArgumentParser(prog="python -m reliability.chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="of faults, over all scenarios, or of `pace`"
    )
    parser.add_argument("--faults", type=int, default=25, help="of `designs`, in each run")
    parser.add_argument("--rounds", type=int, default=2, help="of `real`: kills of every kind of process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(scenario.name for scenario in SCENARIOS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and leave nothing behind
    chosen = set(arguments.only.split(","))
    root = Path(tempfile.mkdtemp(prefix="asyncrl-chaos-"))
    found: dict[str, Any] = {}
    broken = 0
    if scenarios := list(_possible(chosen)):
        runs: list[dict[str, Any]] = []
        found["volume"] = {"environment": describe(), "runs": runs}
        for scenario in scenarios:
            runs.append(_volume(scenario, scenarios, arguments, root))
            _keep(arguments.out, found)
        broken += sum(bool(one["lost"] or one["duplicated"] or one["wrong"]) for one in runs)
        say("\n".join(table(runs)))
    if "designs" in chosen:
        runs = designs.compare(arguments.seed, arguments.faults)
        found["designs"] = {"seed": arguments.seed, "environment": describe(), "runs": runs}
        broken += sum(
            one["design"] == designs.OURS and bool(one["lost"] or one["duplicated"] or one["wrong"])
            for one in runs
        )
        say("\n".join(designs.table(runs)))
    if chosen & {"real", "pace"}:
        from . import real  # needs torch, the others do not

        parts = {
            "real": lambda: real.run(arguments.seed, arguments.rounds, root / "real"),
            "pace": lambda: real.run_pace(arguments.seed, arguments.minutes, root / "pace"),
        }
        for name in parts.keys() & chosen:
            found[name] = {"environment": describe(), **parts[name]()}
            say(json.dumps(found[name]))
    if "real_hangs" in chosen:
        from . import real_hangs

        found["real"] = {"environment": describe(), **real_hangs.run(arguments.seed, root / "hangs")}
        say(json.dumps(found["real"]))
    _keep(arguments.out, found)
    if broken:
        say(f"{broken} runs broke a promise; what they left is in {root}")
    else:
        shutil.rmtree(root)
    return broken


def _possible(chosen: set[str]) -> Iterator[Scenario]:
    for scenario in (*SCENARIOS, HARDENING, EPISODES):
        if scenario.name in chosen:
            if reason := scenario.obstacle():
                say(f"{scenario.name} is left out: {reason}")
            else:
                yield scenario


def _keep(path: Path | None, found: dict[str, Any]) -> None:
    """Scenarios that ran with other seeds before keep their place."""
    if path is None:
        return
    kept = json.loads(path.read_text()) if path.exists() else {}
    new = found.get("volume", {"runs": []})["runs"]
    others = [one for one in kept.get("volume", {"runs": []})["runs"] if _key(one) not in map(_key, new)]
    merged = kept | found
    if new:
        merged["volume"] = found["volume"] | {"runs": others + new}
    lines = (f"{json.dumps(name)}: {json.dumps(values)}" for name, values in merged.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _key(one: dict[str, Any]) -> tuple[str, int]:
    return one["scenario"], one["seed"]


def _volume(
    scenario: Scenario, all_: list[Scenario], arguments: argparse.Namespace, root: Path
) -> dict[str, Any]:
    seconds = 60.0 * arguments.minutes * scenario.share / sum(each.share for each in all_)
    load = round(os.getloadavg()[0], 1)
    result = {
        "seed": arguments.seed,
        "load_1min": load,
        **run(scenario, arguments.seed, seconds, root / scenario.name),
    }
    say(f"{scenario.name}: { ({key: value for key, value in result.items() if key != 'recoveries_s'}) }")
    return result


def say(text: str) -> None:
    """To the terminal, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
