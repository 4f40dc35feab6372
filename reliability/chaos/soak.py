"""Hours of faults, about one every half minute, that one learner and one generator live through: does
anything in them grow?"""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from .faults import (
    Scenario,
    fill_disk,
    kill_store,
    lose_power,
    note,
    partition,
    pause_generator,
    pause_learner,
    rewrite_log,
    strike,
    swallow,
    wipe,
)
from .roles import B
from .world import World

SURVIVORS = ("learner", "g0")
GAP_S = 30.0
SEED = 1


def kill_another(world: World, draw: random.Random) -> None:
    """Any generator but the one that is watched."""
    world.kill(f"g{draw.randrange(1, world.generators)}")
    note(world, "kill_generator")


SOAK = Scenario(
    name="soak", gap_s=GAP_S, share=1.0, always=partial(swallow, 0.002, 0.002),
    faults={
        kill_another: 2.0, pause_generator: 2.0, pause_learner: 1.0, kill_store: 1.0, lose_power: 1.0, wipe: 0.5, fill_disk: 0.5,
        partition: 1.0, rewrite_log: 0.5,
    },
)  # fmt: skip


class Watch(threading.Thread):
    """Groups so far, memory and open files of the survivors, every few seconds."""

    def __init__(self, world: World, every_s: float) -> None:
        super().__init__(daemon=True)
        self._world, self._every_s, self._stop_it = world, every_s, threading.Event()
        self._processes = {name: psutil.Process(world.members[name].pid) for name in SURVIVORS}
        self.groups: list[int] = []
        self.rss: dict[str, list[int]] = {name: [] for name in SURVIVORS}
        self.files: dict[str, list[int]] = {name: [] for name in SURVIVORS}

    def run(self) -> None:
        while not self._stop_it.wait(self._every_s):
            self.groups.append(self._world.version * B)
            for name, process in self._processes.items():
                self.rss[name].append(process.memory_info().rss)
                self.files[name].append(process.num_fds())

    def stop(self) -> None:
        self._stop_it.set()
        self.join(10.0)


def soak(directory: Path, seconds: float) -> dict[str, Any]:
    """The slope is over the last three quarters. Raises Stuck, and psutil's error for a dead survivor."""
    # A short one has its faults closer together.
    gap_s = min(GAP_S, seconds / 8)
    with World(directory / "soak", SEED) as world:
        world.start()
        watch = Watch(world, every_s=min(5.0, seconds / 40))
        watch.start()
        began_s = time.monotonic()
        strike(world, replace(SOAK, gap_s=gap_s), SEED, seconds)
        struck_s = time.monotonic() - began_s
        watch.stop()
        restarts = [world.members[name].starts for name in SURVIVORS]
        verdict = world.finish()
    assert restarts == [1, 1], f"starts of {SURVIVORS}: {restarts}; exits {dict(world.exits)}"
    return {
        "seconds": round(struck_s),
        "struck": dict(world.struck),
        "groups": verdict.groups,
        "lost": verdict.lost,
        "twice": verdict.duplicated,
        "wrong": list(verdict.wrong),
    } | {name: growth(watch.groups, watch.rss[name], watch.files[name]) for name in SURVIVORS}


def growth(groups: Sequence[int], rss: Sequence[int], files: Sequence[int]) -> dict[str, Any]:
    """Of one process, over the last three quarters."""
    start = len(groups) // 4
    return {
        "groups_measured": groups[-1] - groups[start],
        "rss_mib": [round(value / 2**20, 2) for value in (rss[start], rss[-1])],
        "rss_growth_bytes_per_group": bytes_per_group(groups[start:], rss[start:]),
        "files": [min(files[start:]), max(files[start:])],
        "files_at_end": files[-1],
    }


def bytes_per_group(groups: Sequence[int] | npt.NDArray[Any], rss: Sequence[int] | npt.NDArray[Any]) -> float:
    """The slope of memory over groups."""
    return round(float(np.polyfit(groups, rss, 1)[0]), 3)
