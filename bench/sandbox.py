"""How many programs a second one core runs in a box: `python -m bench.sandbox [--json FILE]`.

Warm: one box that forks per program. Fresh: a box per program. Bare: a Python process per program, without
any sandbox. Medians of alternating rounds. "Per CPU s" counts the processor time of all processes involved,
so that other work on the machine matters less. It is missing for fresh boxes, which end by being killed, so
that their time is not known.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from asyncrl.sandbox.box import Box
from bench.environment import describe, report

PROGRAM = "print(sum(n * n for n in range(100)))"
EXPECTED = "328350\n"
ROUNDS = 5
ROUND_S = 2.0


def used_s() -> float:
    """Processor time of this process, its children, and theirs, ended or not."""
    own = psutil.Process()
    family = [own, *own.children(recursive=True)]
    return sum(sum(one.cpu_times()[:4]) for one in family)


async def rates(run: Callable[[], Awaitable[str]]) -> tuple[float, float]:
    """Programs per second of the clock and of the processors."""
    count, started_s, started_used_s = 0, time.perf_counter(), used_s()
    while time.perf_counter() - started_s < ROUND_S:
        assert await run() == EXPECTED
        count += 1
    return count / (time.perf_counter() - started_s), count / (used_s() - started_used_s)


async def measure() -> list[dict[str, object]]:
    """One row per way of running."""
    kept = Box()

    async def warm() -> str:
        return (await kept.run(PROGRAM)).stdout

    async def fresh() -> str:
        async with Box() as box:
            return (await box.run(PROGRAM)).stdout

    async def bare() -> str:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
        ).stdout

    ways = {"warm": warm, "fresh": fresh, "bare": bare}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for run in ways.values():
        await run()
    for _ in range(ROUNDS):
        for name, run in ways.items():
            found[name].append(await rates(run))
    await kept.close()
    rows: list[dict[str, object]] = []
    for name, rounds in found.items():
        by_clock, by_cpu = (round(statistics.median(column), 1) for column in zip(*rounds, strict=True))
        rows.append({"box": name, "programs_per_s": by_clock})
        if name != "fresh":
            rows[-1]["programs_per_cpu_s"] = by_cpu
    return rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    report({"environment": describe(bwrap=Path("bwrap")), "rows": asyncio.run(measure())}, arguments.json)


if __name__ == "__main__":
    main()
