"""The scenario `episodes`: every process that takes part in an episode is killed and stopped.

Three more promises are checked beside those of every scenario: an episode that a fault cut is never scored, no
process of a generator outlives it, and the steps never stand still for long.
"""

import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from asyncrl.sandbox import inside
from asyncrl.sandbox.bubblewrap import SCRATCH, Bubblewrap

from . import episode_roles, faults, game
from .episode_roles import MARK
from .faults import Fault, Scenario, note
from .lineage import Verdict
from .world import START_S, World

END_S = 10.0
"""Longest time from the death of a generator to the end of everything that it started."""
SLEEPS_S = {"agent": (0.2, 3.0), "fork server": (2.5, 6.0)}
"""Shortest and longest stop. An agent may take what time it likes; a fork server is killed after 2 s, by the
first episode that needs it, and ends by itself if its generator has died."""
PAUSE_S = 120.0
"""Longest time without a step, also where other work takes the processors."""


@dataclass(slots=True)
class EpisodeWorld(World):
    """A run whose generators have environments."""

    generators: int = len(episode_roles.KINDS)
    learner_role: Callable[..., None] = episode_roles.learner
    generator_role: Callable[..., None] = episode_roles.generator
    preload: str = "reliability.chaos.episode_roles"
    asleep: list[tuple[float, psutil.Process]] = field(default_factory=list)
    """Stopped processes, and when each goes on."""

    def __exit__(self, *error: object) -> None:
        World.__exit__(self, *error)
        for pid in marked(f"{MARK}={self.directory}:"):  # stopped, after a run that did not go on
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def tend(self) -> None:
        World.tend(self)
        for one in [one for one in self.asleep if one[0] <= time.monotonic()]:
            self.asleep.remove(one)
            with suppress(psutil.NoSuchProcess):
                one[1].resume()

    def settle(self) -> None:
        World.settle(self)
        self.bury("")

    def bury(self, generator: object) -> None:
        """Wait until nothing is left of a generator, or with "" of all. Raises Stuck."""
        mark = f"{MARK}={self.directory}:{generator}"
        self.wait(lambda: not marked(mark), END_S, f"end of all processes of generator {generator}")

    def _judge(self) -> Verdict:
        verdict = World._judge(self)
        wrong = [text for event in self._episodes() for text in event["wrong"]]
        pause_s = self.found()["pause_s"]
        wrong += [f"{pause_s} s without a step"] * (pause_s > PAUSE_S)
        return replace(verdict, wrong=(*verdict.wrong, *wrong))

    def found(self) -> dict[str, float]:
        """Episodes, replays after a fault, late tools, dead groups, and the longest time without a step."""
        names = ("episodes", "replays", "late", "dead")
        steps = [event["at_s"] for event in self.events() if event["event"] == "step"]
        pauses = [after - before for before, after in pairwise(steps)]
        lasting = {event["version"]: event for event in self._episodes()}.values()  # not the repeated steps
        counts = {name: sum(event[name] for event in lasting) for name in names}
        return {**counts, "pause_s": round(max(pauses, default=0.0), 2)}

    def _episodes(self) -> list[dict[str, Any]]:
        """What the learner found in the episodes of each step."""
        return [event for event in self.events() if event["event"] == "episodes"]


def marked(mark: str) -> list[int]:
    """The processes that inherited a variable, or with an open end one that begins like it."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            variables = place.read_text(errors="replace").split("\0")
            if any(one.startswith(mark) if mark.endswith(":") else one == mark for one in variables):
                found.append(int(place.parent.name))
    return found


def processes(world: World, kind: str) -> list[psutil.Process]:
    """Of all generators that are awake.

    The kinds are `agent`, `fork server`, `worker`, which plays or runs tools, `MCP server`, and `sandbox`,
    process 1 of the box in which programs run.
    """
    by_parent: dict[int, list[psutil.Process]] = defaultdict(list)
    for one in psutil.process_iter(["ppid"]):
        by_parent[one.info["ppid"]].append(one)

    def below(parents: Iterable[psutil.Process]) -> list[psutil.Process]:
        return [child for one in parents for child in by_parent[one.pid]]

    children = [child for pid in world.pids("generator") for child in by_parent[pid]]
    if kind == "agent":
        return [one for one in children if game.__file__ in _words(one)]
    servers = [one for one in children if "episode_worker" in " ".join(_words(one))]
    if kind == "fork server":
        return servers
    workers = below(servers)
    if kind == "worker":
        return workers
    if kind == "MCP server":
        return [one for one in below(workers) if _words(one)[2:] == [game.__file__, game.SERVER]]
    boxes = [one for one in below(workers) if _words(one)[:1] == ["bwrap"]]
    return [one for one in below(boxes) if inside.__file__ in _words(one)]


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def hurt(kind: str, number: signal.Signals, world: EpisodeWorld, draw: random.Random) -> None:
    """Kill or stop one process of a kind. What has no time in `SLEEPS_S` never goes on."""
    found: list[psutil.Process] = []
    while not found:
        world.wait(lambda: bool(processes(world, kind)), START_S, kind)
        found = processes(world, kind)
    struck = draw.choice(sorted(found, key=lambda one: one.pid))
    with suppress(psutil.NoSuchProcess):  # it has just ended by itself
        struck.send_signal(number)
        note(world, f"{'stop' if number == signal.SIGSTOP else 'kill'} of {kind}")
    if number == signal.SIGSTOP and kind in SLEEPS_S:
        world.asleep.append((time.monotonic() + draw.uniform(*SLEEPS_S[kind]), struck))


def kill_generator(world: EpisodeWorld, draw: random.Random) -> None:
    """And wait for the end of all that it had started."""
    name = f"g{draw.randrange(world.generators)}"
    pid = world.members[name].pid
    world.kill(name)
    note(world, "kill_generator", held=[])
    world.bury(pid)


_PROCESSES: dict[Fault, float] = {
    kill_generator: 1.0,
    faults.pause_generator: 1.0,
    faults.kill_learner: 1.0,
    faults.pause_learner: 1.0,
}
EPISODES = Scenario(
    name="episodes",
    faults=_PROCESSES
    | {
        partial(hurt, kind, number): 1.0
        for kind in ("worker", "fork server", "agent", "MCP server", "sandbox")
        for number in (signal.SIGKILL, signal.SIGSTOP)
    },
    gap_s=0.4,
    share=1.0,
    in_rounds=True,
    world=EpisodeWorld,
    obstacle=Bubblewrap(Path(SCRATCH[0])).problem,
)
