"""Faults that strike a world, and scenarios that mix them. A seed decides all but the timing of processes."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, combinations
from typing import Any

import psutil
from redis.exceptions import RedisError

from asyncrl.cluster.local import obstacle

from .roles import RUN
from .world import START_S, Fsync, World

Fault = Callable[[Any, random.Random], None]


def note(world: World, kind: str, **expected: Any) -> None:
    """It has struck now; what is expected then says when it is over."""
    world.struck[kind] += 1
    world.recoveries[kind].append((time.monotonic(), expected))
    world.noted.append((kind, time.monotonic()))


def kill_generator(world: World, draw: random.Random) -> None:
    name = f"g{draw.randrange(world.generators)}"
    world.kill(name)
    note(world, "kill_generator", held=_held_by(world, name))


def kill_learner(world: World, draw: random.Random) -> None:
    pid = world.members["learner"].pid
    world.kill("learner")
    note(world, "kill_learner", not_pid=pid)


def kill_store(world: World, draw: random.Random) -> None:
    """While a sync is slow, even a kill makes the store forget what it had acknowledged."""
    world.disk.slow(draw.random() < 0.3)
    world.server.kill()
    note(world, "kill_store")
    world.revive_store()


def lose_power(world: World, draw: random.Random) -> None:
    world.server.kill()
    world.disk.lose_power()
    note(world, "power_loss")
    world.revive_store()


def wipe(world: World, draw: random.Random) -> None:
    """FLUSHALL and a restart, or an empty disk."""
    if draw.random() < 0.5:
        with client_of(world) as client:
            client.flushall()
            client.function_flush()
        world.server.kill()
    else:
        world.server.kill()
        world.disk.lose_everything()
    note(world, "wipe")
    world.revive_store()


def rewrite_log(world: World, draw: random.Random) -> None:
    with client_of(world) as client, contextlib.suppress(RedisError):  # one may be under way
        client.bgrewriteaof()
    note(world, "rewrite_log")


def pause_generator(world: World, draw: random.Random) -> None:
    """Mostly longer than a lease."""
    world.pause(f"g{draw.randrange(world.generators)}", draw.uniform(0.5, 4.0))
    note(world, "pause_generator")


def pause_learner(world: World, draw: random.Random) -> None:
    world.pause("learner", draw.uniform(0.2, 2.0))
    note(world, "pause_learner")


def usurp(world: World, draw: random.Random) -> None:
    """A second learner that does not see the lock takes over; the first wakes up again and must be fenced."""
    before = world.version
    world.usurp()
    world.wait(lambda: world.version != before, START_S, "step of the second learner")
    world.run_for(draw.uniform(0.0, 0.3))
    world.wake_old()
    note(world, "usurp")


def second_learner(world: World, draw: random.Random) -> None:
    world.refuse_second()
    note(world, "second_learner")


def fill_disk(world: World, draw: random.Random) -> None:
    """No room for the store's log; room again a moment later."""
    world.disk.fill(True)
    world.run_for(draw.uniform(0.5, 2.0))
    world.disk.fill(False)
    note(world, "full_disk")


def partition(world: World, draw: random.Random) -> None:
    """One pair of roles cannot reach each other for a while: the proxy is silent, or the link is down."""
    pair = draw.choice(sorted(world.pairs))
    world.pairs[pair].cut()
    world.run_for(min(1.0 + draw.expovariate(1 / 1.2), 30.0))
    world.pairs[pair].heal()
    note(world, "link_down" if world.is_spread else "partition", pair=pair)


KINDS = ("learner", "generator", "store", "engine core")
REPLACED_S = 120.0
"""For a machine that is busy; what it took is in the results."""


def stop(kinds: tuple[str, ...], world: World, draw: random.Random) -> None:
    """SIGSTOP of one process of each kind, which nobody wakes."""
    world.wait(lambda: all(world.pids(kind) for kind in kinds), START_S, "process of each kind")
    stopped, at_s = [psutil.Process(draw.choice(world.pids(kind))) for kind in kinds], time.monotonic()
    parents = {process: process.ppid() for process in stopped}
    for process in stopped:
        process.suspend()
    world.wait(
        lambda: not any(_lives(process, parents[process]) for process in stopped),
        REPLACED_S,
        f"end of the stopped {' and '.join(kinds)}",
    )
    world.hangs.append({"kinds": kinds, "at_s": at_s, "replaced_s": round(time.monotonic() - at_s, 2)})
    world.noted.append((f"hang: {' and '.join(kinds)}", at_s))
    world.struck["stop"] += len(kinds)
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _lives(process: psutil.Process, parent: int) -> bool:
    """Whether it has an owner. One stopped at its start outlives its parent; the supervisor ends families."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.ppid() == parent
    except psutil.NoSuchProcess:
        return False


def stops() -> dict[Fault, float]:
    """Of all kinds at once, of each kind, of every pair of kinds."""
    chosen = [KINDS, *combinations(KINDS, 1), *combinations(KINDS, 2)]
    return {partial(stop, kinds): 1.0 for kinds in chosen}


def swallow(swallow_rate: float, repeat_rate: float, world: World, draw: random.Random) -> None:
    """From now on."""
    for name in ("generators", "learner"):
        world.proxies[name].swallow_rate, world.proxies[name].repeat_rate = swallow_rate, repeat_rate


def key_of(place: str) -> str:
    """Of the store."""
    return f"{{{RUN}:train}}:{place}"


def _held_by(world: World, name: str) -> list[int]:
    """The ids that dead incarnations of a generator hold."""
    try:
        with client_of(world) as client:
            holders: Mapping[bytes, bytes] = client.hgetall(key_of("holders"))
    except RedisError:
        return []
    return [int(i) for i, holder in holders.items() if holder.startswith(f"{name}:".encode())]


@contextlib.contextmanager
def client_of(world: World) -> Any:
    """A client of the store itself."""
    with world.buffer() as buffer:
        yield buffer._connection.client


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Faults by weight, one every `gap_s` on average."""

    name: str
    faults: dict[Fault, float]
    gap_s: float
    share: float
    """Of the time of a whole run of the harness."""
    fsync: Fsync = "everysec"
    is_spread: bool = False
    calm: bool = False
    """The next fault waits until the run has gone on: only then are times those of one fault."""
    calm_steps: int = 3
    at_once: tuple[int, ...] = (1,)
    """How many strike together, drawn from these."""
    hang_s: float = float("inf")
    """Silence after which a process is replaced. Finite: each fault strikes once before any strikes again."""
    in_rounds: bool = False
    """Each fault strikes once in every round, instead of by weight."""
    always: Fault = field(default=lambda world, draw: None)
    """Set up before the first fault."""
    world: type[World] = World
    """The run that is struck."""
    obstacle: Callable[[], str | None] = field(default=lambda: None)
    """Why it cannot run on this machine."""


_PROCESSES: dict[Fault, float] = {kill_generator: 1.0, kill_learner: 1.0, kill_store: 1.0}
SCENARIOS = (
    Scenario(name="kills", faults=_PROCESSES, gap_s=0.35, share=0.27),
    Scenario(name="power", faults={lose_power: 5.0, kill_learner: 1.0, rewrite_log: 0.5}, gap_s=0.4, share=0.20),
    Scenario(name="wipes", faults={wipe: 3.0, kill_learner: 1.0, kill_generator: 1.0}, gap_s=0.6, share=0.08),
    Scenario(
        name="replies", faults={kill_generator: 1.0, kill_learner: 1.0, lose_power: 1.0}, gap_s=4.0, share=0.12,
        always=partial(swallow, 0.1, 0.1),
    ),
    Scenario(
        name="zombies", faults={pause_generator: 4.0, pause_learner: 1.0, usurp: 1.2, second_learner: 0.6}, gap_s=0.4, share=0.12
    ),
    Scenario(name="partitions", faults={partition: 1.0}, gap_s=0.3, share=0.15, calm=True),
    Scenario(name="links", faults={partition: 1.0}, gap_s=0.3, share=0.15, calm=True, is_spread=True, obstacle=obstacle),
    Scenario(
        name="one-by-one", gap_s=0.2, share=0.12, calm=True,
        faults=_PROCESSES | {lose_power: 1.0, wipe: 0.5, fill_disk: 0.5},
    ),
    Scenario(name="hangs", faults=stops(), gap_s=0.3, share=0.05, calm=True, hang_s=2.0),
    Scenario(name="disk", faults={fill_disk: 3.0, kill_generator: 1.0, kill_learner: 1.0}, gap_s=0.5, share=0.03),
    Scenario(name="disk-always", faults={fill_disk: 3.0, kill_generator: 1.0}, gap_s=0.5, share=0.02, fsync="always"),
    Scenario(
        name="mixed", gap_s=0.8, share=0.06, always=partial(swallow, 0.01, 0.01),
        faults=_PROCESSES | {lose_power: 1.0, wipe: 0.5, pause_generator: 1.0, pause_learner: 0.5, usurp: 0.3, partition: 0.3},
    ),
)  # fmt: skip


def strike(world: World, scenario: Scenario, seed: int, seconds: float, *, most: int = 1 << 30) -> None:
    """Faults for about `seconds`, at most `most`, in an order that the seed decides."""
    draw = random.Random(f"{scenario.name} {seed}")
    kinds, weights = zip(*scenario.faults.items(), strict=True)
    scenario.always(world, draw)
    until_s = time.monotonic() + seconds
    in_turn: Iterator[Fault] = iter(
        [kinds[0], *draw.sample(kinds[1:], len(kinds) - 1)] if scenario.hang_s < float("inf") else ()
    )
    if scenario.in_rounds:
        in_turn = chain.from_iterable(iter(lambda: draw.sample(kinds, len(kinds)), None))
    for _ in range(most):
        if time.monotonic() > until_s:
            return
        world.run_for(draw.uniform(0.2, 1.8) * scenario.gap_s)
        first = len(world.noted)
        for _ in range(draw.choice(scenario.at_once)):
            world.wait(lambda: world.server.is_running, START_S, "store")
            (next(in_turn, None) or draw.choices(kinds, weights)[0])(world, random.Random(draw.random()))
        if scenario.calm:
            target = world.version + scenario.calm_steps
            world.wait(lambda: world.version >= target, START_S, f"step {target}")  # noqa: B023 - it is over before the next
            world.end_round(world.noted[first:])
