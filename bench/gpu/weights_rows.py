"""The row about weights: a version over each transport; processes of NCCL and a generator are killed."""

import asyncio
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.engine.base import Engine
from asyncrl.errors import EngineError, TransferError
from asyncrl.hosting.gpus import count_together
from asyncrl.preflight.fit import HOST_SLOTS, with_slots
from asyncrl.weights.base import TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout
from asyncrl.weights.publisher import SlotPublisher
from asyncrl.weights.staging import HostStaging
from bench.gpu.allowed_time import allowed_time, measured_rate, passes
from bench.gpu.engine_rows import START_S, changed_environment, running, seat_of, seen_by
from bench.gpu.figures import Figure, Place, absent, judged, noted

TIMES = 4  # updates by each transport; the first one, which opens connections, is not counted
DEADLINE_S = 30.0
MOST_BACK_S = 2 * DEADLINE_S  # after a death: a deadline, and an update
TRIES = 20  # a small model may be loaded before the kill
ASKED_S = 0.5  # until a process that runs has read what the other one has sent
READER = "generator"


@dataclass(slots=True)
class _Learner:
    """The learner's side: a publisher of the model's weights."""

    publisher: SlotPublisher
    tensors: dict[str, Tensor]
    total_bytes: int
    version: int = 0

    @classmethod
    def open(cls, place: Place, config: Config) -> "_Learner":
        device = place.device
        files = sorted(Path(place.model).glob("*.safetensors"))
        tensors = {
            name: tensor.to(device, torch.bfloat16)
            for file in files
            for name, tensor in load_file(file).items()
        }
        specs = [TensorSpec(name=n, dtype="bfloat16", shape=tuple(t.shape)) for n, t in tensors.items()]
        layout = Layout.plan(specs, config.weights.bucket_mib << 20)
        publisher = SlotPublisher(
            layout,
            device="cpu" if config.weights.slots == "host" else device,
            probe_ids=(),
            initial_logprobs=(),
            directory=place.directory / "weights",
            deadline_s=DEADLINE_S,
            interface="127.0.0.1",
        )
        return cls(publisher, tensors, layout.total_bytes)

    def publish(self) -> float:
        """Publish the next version; return the seconds for which a training loop would wait."""
        self.version += 1
        started_s = time.perf_counter()
        published = self.publisher.publish(self.version, self.tensors.items(), ())
        blocked_s = time.perf_counter() - started_s
        published.result(DEADLINE_S)
        return blocked_s

    def order(self, transport: str) -> UpdateOrder:
        """Return the order for the newest version. Raises TransferError, OSError."""
        until_s = time.monotonic() + DEADLINE_S
        while (order := self.publisher.order(READER, transport)) is None:  # a copy of it is being made
            if time.monotonic() > until_s:
                raise TransferError(f"{transport}: no copy of the version within {DEADLINE_S:.0f} s")
            time.sleep(0.001)
        return order


def weights(place: Place) -> Iterator[Figure]:
    """Publish and load versions over each transport, then kill processes during a transfer."""
    config = with_slots(load_config(place.directory / "task.yaml"))
    on_host = config.weights.slots == "host"
    names = [name for name in transports(place) if not (on_host and name == "nccl")]
    with (
        asyncio.Runner() as runner,
        _engine(runner, config) as started,
        _host(place, config) as host,
    ):
        learner, generator = _Learner.open(place, config), _Generator(runner, started, host)
        try:
            yield noted("version", learner.total_bytes / 1e6, "MB")
            blocked_s = statistics.median([learner.publish() for _ in range(TIMES)])
            yield noted("learner's loop blocked by publishing", 1000 * blocked_s, "ms")
            if on_host:
                yield noted("slots", note=HOST_SLOTS)
            for transport in names:
                yield from _by(transport, place, config, learner, generator)
            if "nccl" in names:
                for end in ("learner", "generator"):
                    yield from _killed(end, learner, generator)
            else:
                alone = "one GPU: NCCL refuses two processes on it"
                yield absent("nccl", "versions are in memory of the host" if on_host else alone)
            yield from _killed_loading(place, config, learner, generator)
        finally:
            learner.publisher.close()


@contextlib.contextmanager
def _engine(runner: asyncio.Runner, config: Config) -> Iterator[Engine]:
    opened = running(config)
    started = runner.run(opened.__aenter__())
    try:
        yield started
    finally:
        runner.run(opened.__aexit__(None, None, None))


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process that stages versions: the part of a generator outside of its engine."""

    pid: int
    _pool: ProcessPoolExecutor
    _files: Path

    async def stage(self, order: UpdateOrder) -> UpdateOrder:
        """Return the order for the engine. Raises TransferError."""
        return await asyncio.wrap_future(self._pool.submit(_stage, self._files, order))


@dataclass(frozen=True, slots=True)
class _Generator:
    """A generator's engine, which is driven by the loop of `runner`, and the process that stages for it."""

    runner: asyncio.Runner
    engine: Engine
    host: HostProcess

    async def adopt(self, order: UpdateOrder) -> None:
        """Do what a generator does with an order."""
        ready = await self.host.stage(order)
        await self.engine.begin_update()
        await self.engine.receive(ready)
        await self.engine.finish_update(order.weights)


@contextlib.contextmanager
def open_host_process(files: Path) -> Iterator[HostProcess]:
    """Start the process, and end it. Orders may name paths below `files`."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield HostProcess(pool.submit(os.getpid).result(), pool, files)
        pool.submit(_close, files).result()


@cache
def _staging(files: Path) -> HostStaging:
    return HostStaging(files)


def _stage(files: Path, order: UpdateOrder) -> UpdateOrder:
    return _staging(files).stage(order)


def _close(files: Path) -> None:
    _staging(files).close()


@contextlib.contextmanager
def _host(place: Place, config: Config) -> Iterator[HostProcess]:
    """Stage on the generator's GPUs: NCCL refuses two processes on the learner's, which this process uses."""
    with contextlib.ExitStack() as stack:
        with changed_environment(seen_by(seat_of(config))):
            host = stack.enter_context(open_host_process(place.directory))
        yield host


def transports(place: Place) -> list[str]:
    """Return the transports that learner and generator of this machine can use."""
    return ["slot", "disk", "tcp", *([] if place.on_gpu and count_together() == 1 else ["nccl"])]


def _by(
    transport: str, place: Place, config: Config, learner: _Learner, generator: _Generator
) -> Iterator[Figure]:
    engine = generator.engine
    seconds, stalls_s = [], []
    for _ in range(TIMES):
        learner.publish()
        order = learner.order(transport)
        started_s, before_s = time.perf_counter(), engine.stats().paused_s
        generator.runner.run(generator.adopt(order))
        seconds.append(time.perf_counter() - started_s)
        stalls_s.append(engine.stats().paused_s - before_s)
        learner.publisher.release(READER)
    took_s = statistics.median(seconds[1:])
    rate = learner.total_bytes / took_s / 1e9
    gpu = next(iter(seat_of(config).gpus), None)
    made_of = passes(transport, gpu, on_host=config.weights.slots == "host")
    allowed = allowed_time(made_of, partial(measured_rate, place), learner.total_bytes, len(learner.tensors))
    share = f"{rate / allowed.bare_rate:.2f} of {allowed.bare_name}" if allowed else ""
    yield noted(f"{transport}: requests paused", 1000 * statistics.median(stalls_s[1:]), "ms")
    yield noted(f"{transport}: sent, verified and loaded", rate, "GB/s", note=share)
    if allowed:
        name = f"{transport}: time, divided by what is allowed"
        yield place.speed(name, took_s / allowed.total_s, at_most=1.0, note=allowed.note)


def _killed(end: str, learner: _Learner, generator: _Generator) -> Iterator[Figure]:
    """Kill one of NCCL's two processes during a transfer, and measure until the next version is loaded."""
    engine, runner = generator.engine, generator.runner
    learner.publish()
    order, before_s = learner.order("nccl"), engine.stats().paused_s
    (sends,), (receives,) = _ends(os.getpid()), _ends(generator.host.pid)

    async def cut_off() -> bool:
        sends.suspend()  # so that the transfer cannot be over before the kill
        receiving = asyncio.create_task(generator.adopt(order))
        await asyncio.sleep(ASKED_S)
        if end == "learner":
            sends.kill()
        else:
            receives.suspend()
            sends.resume()
            await asyncio.sleep(ASKED_S)  # it sends, and nothing receives
            receives.kill()
        with contextlib.suppress(TransferError, EngineError):
            await receiving
            return False
        return True

    started_s = time.perf_counter()
    refused = runner.run(cut_off()) and engine.stats().paused_s == before_s
    learner.publish()
    runner.run(generator.adopt(learner.order("nccl")))
    learner.publisher.release(READER)
    seconds = time.perf_counter() - started_s
    yield judged(
        f"nccl: kill -9 of the {end}'s process during a transfer, back after",
        seconds if refused else float("nan"),
        "s",
        at_most=MOST_BACK_S,
        note="" if refused else "a version that had not arrived paused the engine",
    )
    until_s = time.monotonic() + DEADLINE_S
    while (left := len(_ends(os.getpid()))) > 1 and time.monotonic() < until_s:
        time.sleep(0.1)
    yield judged(f"nccl: learner's processes after kill -9 of the {end}'s", left, at_least=1, at_most=1)


def _ends(parent: int) -> list[psutil.Process]:
    """The processes of NCCL that `parent` has started and that run."""
    found = []
    for process in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and may still be a zombie
            if "asyncrl.weights.nccl" in process.cmdline():
                found.append(process)
    return found


def _killed_loading(
    place: Place, config: Config, learner: _Learner, generator: _Generator
) -> Iterator[Figure]:
    """Kill a generator while it loads from a slot; another one then adopts a new version."""
    runner = generator.runner

    async def cut_off(order: UpdateOrder) -> bool:
        receiving = asyncio.create_task(generator.adopt(order))
        path = order.details["slot"]["path"]
        was_loading = await asyncio.to_thread(_kill_reader, generator.host.pid, os.stat(path), receiving.done)
        with contextlib.suppress(EngineError, TransferError):
            await receiving
        return was_loading

    for _ in range(TRIES):
        learner.publish()
        order = learner.order("slot")
        started_s = time.perf_counter()
        if runner.run(cut_off(order)):
            break
    else:
        raise TransferError(f"slot: none of {TRIES} loads took long enough to be cut off")
    for _ in range(TIMES):
        learner.publish()
    learner.publisher.release(READER)  # as the control plane does
    places = set(learner.publisher._places.values())
    pinned = sum(slot.readers for place in places for slot in place._slots)
    yield judged("slot: pinned after kill -9 of the generator that loaded it", pinned, at_most=0)
    with _engine(runner, config) as other:
        runner.run(replace(generator, engine=other).adopt(learner.order("slot")))
        seconds = time.perf_counter() - started_s
    name = "slot: kill -9 of a generator that loads, another one has the next version after"
    yield place.speed(name, seconds, "s", at_most=START_S + MOST_BACK_S)


def _kill_reader(host: int, file: os.stat_result, is_over: Callable[[], bool]) -> bool:
    """Kill the process of the engine that has the file open; False if none had before the update was over.

    The process `host`, which verifies before the engine loads, is not killed.
    """
    engines = [each for each in psutil.Process().children(recursive=True) if each.pid != host]
    while not is_over():
        for process in engines:
            if _has_open(process.pid, file):
                process.suspend()
                if _has_open(process.pid, file):  # still: it cannot finish the load now
                    process.kill()
                    return True
                process.resume()
    return False


def _has_open(pid: int, file: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), file):
                    return True
    return False
