"""A thousand generators at one learner: the processor's work per group, heartbeats, and a storm of joins.

Generators are light: each has its real connection of the control plane (CURVE over TCP, its heartbeats) and
its real connection to the store, and puts frames at a fixed rate; it samples nothing. The learner is the
real control plane, and a consumer of the real buffer, in a process of its own. The work of learner and store
server per group is compared with that of 16 generators, in the same run.

    python -m bench.crowd [--generators 1000] [--json bench/results/crowd.json]
"""

import argparse
import asyncio
import multiprocessing
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import zmq
import zmq.asyncio

from asyncrl.buffer.base import BufferRules, PutOutcome
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.server import StoreServer, find_server
from asyncrl.config.sections import ControlConfig
from asyncrl.config.store import StoreConfig
from asyncrl.control.base import Heartbeat, Hello
from asyncrl.control.client import ControlClient
from asyncrl.control.membership import RunIdentity
from asyncrl.control.zmq import ControlHub
from asyncrl.run.keys import RunKeys
from asyncrl.version import __version__
from bench.environment import describe, report

FEW = 16
KEYS = RunKeys(bytes(32))
CONTROL = ControlConfig()
JOIN_S = 60.0


class NoWeights:
    """A publisher without versions: what generators fetch is measured elsewhere (bench.transfer)."""

    one_host = False

    def order(self, reader: str, transport: str) -> None:
        return None

    def release(self, reader: str) -> None: ...


def learner(pipe: Connection, url: str, run: str, rules: BufferRules) -> None:
    """Consume groups until told to stop; answer each look with what has been seen."""
    hub = ControlHub(
        "tcp://127.0.0.1:*",
        NoWeights(),  # type: ignore[arg-type]
        CONTROL,
        RunIdentity(release=__version__, config_hash="crowd"),
        transport="tcp",
        deadline_s=60.0,
        keys=KEYS.control,
    )
    connection, ledger, silent_s = StoreConnection(url), Ledger(), 0.0
    buffer = RedisBuffer(connection, run, rules)
    buffer.recover(ledger, version=0, limit=rules.groups * 8)
    pipe.send(hub.endpoint)
    rounds = 0
    while True:
        if pipe.poll():
            if pipe.recv() == "stop":
                break
            pipe.send((len(hub.members()), hub.counters()["died"], ledger.consumed, silent_s))
            silent_s = 0.0
        if hub.rounds != rounds:  # it has other figures
            rounds = hub.rounds
            silent_s = max([silent_s, *(member.silent_s for member in hub.members())])
        take = buffer.take(ledger, rules.groups, window=rules.groups)
        if take is None:
            time.sleep(0.02)
            continue
        buffer.frames(take.ids)
        ledger.consume(take.ids)
        buffer.set_version(ledger.takes, limit=ledger.consumed + rules.groups * 8)
        buffer.commit(ledger.takes, ledger.chain)
    hub.stop("measured")
    buffer.close()
    pipe.send(buffer.audit().missing)
    connection.close()


async def generator(name: str, endpoint: str, url: str, run: str, work: Any, joined: Any) -> None:
    """Join, then put a frame every `period_s` until `work` says stop."""
    rules, frame, period_s, stop = work
    client = ControlClient(
        endpoint, heartbeat_s=CONTROL.heartbeat_s, timeout_s=60.0, join_s=JOIN_S * 5, keys=KEYS.join.control
    )
    hello = Hello(
        generator_id=name,
        incarnation="1",
        release=__version__,
        config_hash="crowd",
        version=0,
        transports=("tcp",),
    )
    await client.join(hello)
    with joined.get_lock():
        joined.value += 1
    beat = Heartbeat(generator_id=name, incarnation="1", version=0, state="sampling")
    connection = StoreConnection(url)
    buffer = RedisBuffer(connection, run, rules)
    due_s = time.monotonic() + period_s * (hash(name) % 997) / 997
    while not stop.is_set():
        client.beat(beat)
        await asyncio.sleep(min(max(due_s - time.monotonic(), 0.0), 0.5))
        if time.monotonic() < due_s:
            continue
        due_s += period_s
        for ticket in (await asyncio.to_thread(buffer.lease, f"{name}:1", 1)).tickets:
            while await asyncio.to_thread(buffer.put, f"{name}:1", ticket.id, frame) is PutOutcome.FULL:
                await asyncio.sleep(0.1)
    await client.leave()
    connection.close()


class SharedContext:
    """The context of all clients of a process, each of which believes that it has its own.

    A context has threads; two thousand of them would be what is measured.
    """

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self.socket = self._context.socket

    def term(self) -> None: ...


def generators(names: list[str], *arguments: Any) -> None:
    """Run generators in this process until they are told to stop."""
    shared = SharedContext()
    zmq.asyncio.Context = lambda: shared  # type: ignore[assignment]

    async def all_of_them() -> None:
        await asyncio.gather(*(generator(name, *arguments) for name in names))

    asyncio.run(all_of_them())


def measured(count: int, server: StoreServer, options: argparse.Namespace) -> dict[str, float]:
    """Return what `count` generators cost learner and store."""
    context, run = multiprocessing.get_context("spawn"), f"crowd-{count}"
    rules = BufferRules(groups=max(8, count // 8))
    ours, theirs = context.Pipe()
    hub = context.Process(target=learner, args=(theirs, server.url, run, rules))
    hub.start()
    theirs.close()  # so that a learner that dies ends the wait for its answers
    endpoint, joined, stop = ours.recv(), context.Value("i", 0), context.Event()
    work = (rules, bytes(options.frame_bytes), options.period_s, stop)
    names = [f"g{index}" for index in range(count)]
    each = -(-count // options.processes)
    started_s = time.monotonic()
    crowd = [
        context.Process(
            target=generators, args=(names[at : at + each], endpoint, server.url, run, work, joined)
        )
        for at in range(0, count, each)
    ]
    try:
        for process in crowd:
            process.start()
        while joined.value < count:
            if time.monotonic() - started_s > JOIN_S * 5:
                raise TimeoutError(f"{joined.value} of {count} joined")
            time.sleep(0.05)
        joined_s = time.monotonic() - started_s
        watched = [psutil.Process(hub.pid), psutil.Process(server.pid)]
        time.sleep(options.period_s)  # the first frames come at once
        look(ours)
        before_s, (_, _, begun, _) = [sum(p.cpu_times()[:2]) for p in watched], look(ours)
        time.sleep(options.seconds)
        after_s, (members, died, ended, silent_s) = [sum(p.cpu_times()[:2]) for p in watched], look(ours)
        groups = ended - begun
        stop.set()
        for process in crowd:
            process.join(60)
        ours.send("stop")
        missing = ours.recv()
    finally:
        for process in (hub, *crowd):
            process.kill()
            process.join()
    learner_s, store_s = (after - before for before, after in zip(before_s, after_s, strict=True))
    return {
        "generators": count,
        "seconds_until_all_joined": round(joined_s, 1),
        "members": members,
        "died": died,
        "groups": groups,
        "missing": missing,
        "longest_silence_s": round(silent_s, 2),
        "learner_ms_per_group": round(learner_s / groups * 1000, 3),
        "store_ms_per_group": round(store_s / groups * 1000, 3),
        "cores": round((learner_s + store_s) / options.seconds, 3),
    }


def look(pipe: Connection) -> Any:
    """Ask the learner what it has seen."""
    pipe.send("look")
    return pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generators", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2, help="that divide the generators")
    parser.add_argument("--frame-bytes", type=int, default=65536)
    parser.add_argument("--period-s", type=float, default=10.0, help="between two groups of a generator")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # inherited by the processes
    with (
        tempfile.TemporaryDirectory() as directory,
        StoreServer(StoreConfig(), Path(directory)) as server,
    ):
        rows = [measured(count, server, options) for count in (FEW, options.generators)]
    few, many = (row["learner_ms_per_group"] + row["store_ms_per_group"] for row in rows)
    result = {
        **describe("asyncrl", "redis", "pyzmq", server=find_server("auto")),
        "rows": rows,
        "ratio": round(many / few, 3),
    }
    report(result, options.json)


if __name__ == "__main__":
    main()
