"""Breaks the protocol in one place, or two at once, and sees whether a simulated seed notices.

    python -m reliability.simulation.mutants                             # all of them; exit 1 if one survives that should not
    python -m reliability.simulation.mutants lease --seeds 5000          # those whose description has that
    python -m reliability.simulation.mutants --out bench/results/mutants.json    # those that the file lacks

A mutant is a textual replacement that must match; one that no longer matches is an error. Pairs are for
defences that overlap: alone either may go, because the other one holds.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.environment import describe

from .mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
SEEDS = 1500
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    seeds: int
    """Until it was noticed."""
    how: str
    """Empty for a survivor."""


def try_mutant(mutant: Mutant, seeds: int = SEEDS) -> Verdict:
    """Run seeds on a broken copy until one fails. Raises LookupError."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        shutil.copytree(ROOT / "asyncrl", root / "asyncrl")
        shutil.copytree(ROOT / "reliability" / "simulation", root / "reliability" / "simulation")
        shutil.copy(ROOT / "reliability" / "__init__.py", root / "reliability")
        for edit in mutant.edits:
            edit.apply(root)
        argv = [sys.executable, "-m", "reliability.simulation.hunt", str(seeds)]
        try:
            done = subprocess.run(
                argv,
                cwd=root,
                env=os.environ | {"PYTHONPATH": str(root)},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Verdict(mutant, seeds, f"nothing ends within {TIMEOUT_S:.0f} s")
    if done.returncode == 0:
        return Verdict(mutant, seeds, "")
    seed, _, how = done.stdout.partition(" ")
    if not seed.isdigit():
        return Verdict(mutant, 1, f"does not start: {done.stderr[-300:]}")
    return Verdict(mutant, int(seed), how.strip())


def check_matches() -> None:
    """Every replacement still finds its text. Raises LookupError."""
    with tempfile.TemporaryDirectory() as directory:
        for mutant in MUTANTS:
            for edit in mutant.edits:
                copy = Path(directory) / edit.path
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / edit.path, copy)
            for edit in mutant.edits:
                edit.apply(Path(directory))


def keep(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """One line for each mutant, in the order of the table."""
    rows = ",\n".join(
        f"  {json.dumps(each.what)}: {json.dumps(found[each.what])}" for each in MUTANTS if each.what in found
    )
    path.write_text(f'{{\n "environment": {json.dumps(describe())},\n "mutants": {{\n{rows}\n }}\n}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m reliability.simulation.mutants")
    parser.add_argument("word", nargs="?", default="", help="a regular expression, in the description")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="at most, for each mutant")
    parser.add_argument("--out", type=Path, help="JSON; mutants that it has are not tried again")
    arguments = parser.parse_args()
    check_matches()
    found = (
        json.loads(arguments.out.read_text())["mutants"] if arguments.out and arguments.out.exists() else {}
    )
    chosen = [
        mutant for mutant in MUTANTS if re.search(arguments.word, mutant.what) and mutant.what not in found
    ]
    started_s, killed, wrong = time.perf_counter(), 0, 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for verdict in as_completed(pool.submit(try_mutant, mutant, arguments.seeds) for mutant in chosen):
            mutant, seeds, how = verdict.result().mutant, verdict.result().seeds, verdict.result().how
            killed += bool(how)
            wrong += not how and not mutant.survives
            fate = (
                f"killed by seed {seeds}: {how[:90]}" if how else f"SURVIVED {seeds} seeds {mutant.survives}"
            )
            print(f"{mutant.what:75} {fate}", flush=True)
            found[mutant.what] = {"seeds": seeds, "how": how.partition(": (")[0]}
            if arguments.out:
                keep(arguments.out, found)
    share = killed / max(len(chosen), 1)
    print(
        f"{killed} of {len(chosen)} mutants killed ({share:.1%}) in {time.perf_counter() - started_s:.0f} s"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
