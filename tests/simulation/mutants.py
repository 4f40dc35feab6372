"""Breaks the protocol in one place, or two at once, and sees whether a simulated seed notices.

    python -m tests.simulation.mutants               # all of them, one line each; exit 1 if one survives that should not
    python -m tests.simulation.mutants lease         # those whose description contains the word
    python -m tests.simulation.mutants lease 5000    # with that many seeds at most

A mutant is a textual replacement that must match; one that no longer matches is an error. Pairs are for defences that
overlap: alone either may go, because the other one holds.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .mutant_table import MUTANTS, Mutant
from .world import simulate

ROOT = Path(__file__).parents[2]
SEEDS = 1500
TIMEOUT_S = 1800.0
HUNT = "--hunt"


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    seeds: int
    """Until it was noticed."""
    how: str
    """Empty for a survivor."""


def hunt(seeds: int) -> int:
    """In the process of a mutant: print the first seed that fails, and why."""
    for seed in range(1, seeds + 1):
        try:
            simulate(seed)
        except Exception as error:  # noqa: BLE001 - whatever broke, it was noticed
            print(f"{seed} {type(error).__name__}: {str(error).splitlines()[0]}")
            return 1
    return 0


def try_mutant(mutant: Mutant, seeds: int = SEEDS) -> Verdict:
    """Run seeds on a broken copy until one fails. Raises LookupError."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        shutil.copytree(ROOT / "asyncrl", root / "asyncrl")
        shutil.copytree(ROOT / "tests" / "simulation", root / "tests" / "simulation")
        for edit in mutant.edits:
            edit.apply(root)
        argv = [sys.executable, "-m", "tests.simulation.mutants", HUNT, str(seeds)]
        try:
            done = subprocess.run(
                argv, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=TIMEOUT_S
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


def main() -> int:
    if sys.argv[1:2] == [HUNT]:
        return hunt(int(sys.argv[2]))
    check_matches()
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    most_seeds = int(sys.argv[2]) if len(sys.argv) > 2 else SEEDS
    chosen = [mutant for mutant in MUTANTS if word in mutant.what]
    started_s, killed, wrong = time.perf_counter(), 0, 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for verdict in pool.map(lambda mutant: try_mutant(mutant, most_seeds), chosen):
            killed += bool(verdict.how)
            wrong += not verdict.how and not verdict.mutant.survives
            fate = f"killed by seed {verdict.seeds}: {verdict.how[:90]}" if verdict.how else f"SURVIVED {verdict.seeds} seeds"
            print(f"{verdict.mutant.what:75} {fate} {'' if verdict.how else verdict.mutant.survives}", flush=True)
    share = killed / max(len(chosen), 1)
    print(f"{killed} of {len(chosen)} mutants killed ({share:.1%}) in {time.perf_counter() - started_s:.0f} s")
    return bool(wrong) or share < 0.95


if __name__ == "__main__":
    sys.exit(main())
