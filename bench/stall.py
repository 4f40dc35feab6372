"""What a weight update costs a generator, step by step, with requests running in a real engine.

python -m bench.stall --model build/stories15m/model [--updates 40] [--json bench/results/stall.json]
    [--device cuda --dtype bfloat16]

Updates over `slot` and over `tcp` take turns, so that both see the same machine. `ratio` is the time of a
plain copy of the version, on the same device in the same run, divided by that of stage and load.

stage   slot: verify the learner's memory. tcp: fetch from another process, and verify. Requests run on
pause   until the running step has ended          |
load    the engine's workers load from the memory  > the stall
resume  label the version and let requests run     |
probe   score the probe; requests run
"""

import argparse
import asyncio
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import torch
from safetensors.torch import load_file

from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.vllm.engine import VLLMEngine
from asyncrl.weights.base import TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout, checksums
from asyncrl.weights.slots import Slot
from asyncrl.weights.staging import HostStaging
from asyncrl.weights.stream import SlotServer
from asyncrl.workers import pack, receive
from bench.environment import add_options, describe, engine_package, report

STEPS = ("stage", "pause", "load", "resume", "probe")
TRANSPORTS = ("slot", "tcp")
PROBE = tuple(range(1, 33))


def version_of(model: str, dtype: str) -> tuple[Layout, torch.Tensor]:
    tensors = {
        name: each.to(getattr(torch, dtype))
        for file in sorted(Path(model).glob("*.safetensors"))
        for name, each in load_file(file).items()
    }
    specs = [
        TensorSpec(name=name, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
        for name, t in tensors.items()
    ]
    layout = Layout.plan(specs, WeightsConfig().bucket_mib << 20)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    for index, tensor in enumerate(tensors.values()):
        layout.view(buffer, index).copy_(tensor)
    return layout, buffer


def send(arguments):
    """The learner's side, in a process of its own: it serves one slot until it is killed."""
    layout, buffer = version_of(arguments.model, arguments.dtype)
    slot = Slot.create(layout.total_bytes)
    slot.buffer.copy_(buffer)
    server = SlotServer("127.0.0.1", lambda stamp: slot.file, layout.total_bytes, deadline_s=60.0)
    sys.stdout.buffer.write(pack(server.source(1)))
    sys.stdout.buffer.flush()
    signal.pause()


async def update(engine, staging, order):
    """Seconds of every step."""
    marks_s = [time.monotonic()]
    ready = await asyncio.to_thread(staging.stage, order)
    marks_s.append(time.monotonic())
    await engine.begin_update()
    marks_s.append(time.monotonic())
    await engine.receive(ready)
    marks_s.append(time.monotonic())
    await engine.finish_update(order.weights)
    marks_s.append(time.monotonic())
    await engine.score(PROBE)
    marks_s.append(time.monotonic())
    return {step: later - earlier for step, earlier, later in zip(STEPS, marks_s, marks_s[1:], strict=False)}


async def measure(arguments, source):
    layout, buffer = version_of(arguments.model, arguments.dtype)
    engine = await VLLMEngine.start(
        ModelConfig(path=arguments.model, dtype=arguments.dtype),
        GeneratorConfig(max_running=128, kv_cache_gib=1.0, threads=1),
        SamplingConfig(max_prompt_tokens=64, max_response_tokens=128),
        WeightsConfig(),
        device=arguments.device,
    )
    slot = Slot.create(layout.total_bytes, arguments.device)
    slot.buffer.copy_(buffer)
    sums = {"slot": checksums(slot.buffer, layout), "tcp": checksums(buffer, layout)}
    shared = {
        "source": source,
        "slot": slot.describe(),
        "layout": layout.to_plain(),
    }
    staging, found = HostStaging(Path("/")), {transport: [] for transport in TRANSPORTS}
    spec = SamplingSpec(temperature=1.0, max_response_tokens=128)

    async def sample_forever():
        while True:
            await engine.sample(PROBE, 64, spec)

    sampling = asyncio.create_task(sample_forever())
    try:
        for version in range(2 * arguments.updates + 2):  # the first of each is not counted
            await asyncio.sleep(0.3)
            transport = TRANSPORTS[version % 2]
            order = UpdateOrder(
                version=version + 1,
                transport=transport,
                deadline_s=60.0,
                details={**shared, "checksums": list(sums[transport])},
                probe_ids=PROBE,
                probe_logprobs=(),
                initial_logprobs=(),
            )
            found[transport].append(await update(engine, staging, order))
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await engine.close()
        staging.close()
    return layout.total_bytes, found, copy_s(slot.buffer)


def copy_s(buffer: torch.Tensor) -> float:
    """Median time of a plain copy on the device of the version."""
    target, seconds = torch.empty_like(buffer), []
    for _ in range(20):
        started_s = time.perf_counter()
        target.copy_(buffer)
        if buffer.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def summary(updates, copied_s):
    """Medians of the steps, the ratio, and quartiles of the time in which no request runs."""
    stalls_s = [each["pause"] + each["load"] + each["resume"] for each in updates]
    return {
        "median_s": {step: statistics.median(each[step] for each in updates) for step in STEPS},
        "ratio": copied_s / statistics.median(each["stage"] + each["load"] for each in updates),
        "stall_s": dict(zip(("lower", "median", "upper"), statistics.quantiles(stalls_s, n=4), strict=True)),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--sender", action="store_true", help=argparse.SUPPRESS)
    add_options(parser)
    arguments = parser.parse_args()
    if arguments.sender:
        send(arguments)
        return
    command = [sys.executable, "-m", "bench.stall", *sys.argv[1:], "--sender"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as sender:
        try:
            source = msgpack.unpackb(receive(sender.stdout))
            total_bytes, found, copied_s = asyncio.run(measure(arguments, source))
        finally:
            sender.kill()
    result = {
        "workload": {
            "model": arguments.model,
            "device": arguments.device,
            "dtype": arguments.dtype,
            "bytes": total_bytes,
            "updates": arguments.updates,
            "running": 64,
        },
        "environment": describe(engine_package(), "torch"),
        "copy_s": copied_s,
        **{transport: summary(updates[1:], copied_s) for transport, updates in found.items()},
    }
    report(result, arguments.json)


if __name__ == "__main__":
    main()
