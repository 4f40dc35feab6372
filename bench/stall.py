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

The step that the pause waits for samples tokens. `lost_s` is what a request loses: the time from its last
token before the load to its first one after it, less `step_s`, the median time between two tokens.
"""

import argparse
import asyncio
import bisect
import itertools
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
from asyncrl.engine.open import open_engine
from asyncrl.hosting.workers import pack, receive
from asyncrl.weights.base import TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout, checksums
from asyncrl.weights.slots import Slot
from asyncrl.weights.staging import HostStaging
from asyncrl.weights.stream import SlotServer
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


async def watch(engine, tokens_s):
    """Note when a request gets its tokens, again and again."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=128, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    prompt = tokens_input(list(PROBE))
    for number in itertools.count():
        async for _ in engine._llm.generate(prompt, params, request_id=f"watched {number}"):
            tokens_s.append(time.monotonic())


async def update(engine, staging, order, tokens_s):
    """Seconds of every step, and of the gap between two tokens around the load."""
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
    spent_s = [later - earlier for earlier, later in itertools.pairwise(marks_s)]
    loaded_s = marks_s[3]
    async with asyncio.timeout(60):
        while not tokens_s or tokens_s[-1] < loaded_s:
            await asyncio.sleep(0.001)
    after = bisect.bisect(tokens_s, loaded_s)
    return dict(zip(STEPS, spent_s, strict=True)) | {"gap": tokens_s[after] - tokens_s[after - 1]}


async def measure(arguments, source):
    layout, buffer = version_of(arguments.model, arguments.dtype)
    engine = await open_engine(
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

    tokens_s = []
    running = [asyncio.create_task(each) for each in (sample_forever(), watch(engine, tokens_s))]
    try:
        for version in range(2 * arguments.updates + 2):  # the first of each is not counted
            await asyncio.sleep(0.3)
            transport = TRANSPORTS[version % 2]
            order = UpdateOrder(
                version=version + 1,
                transport=transport,
                deadline_s=60.0,
                details={**shared, "checksums": list(sums[transport])},
                probe_ids=(PROBE,),
                probe_logprobs=(),
                initial_logprobs=(),
            )
            found[transport].append(await update(engine, staging, order, tokens_s))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await engine.close()
        staging.close()
    step_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(tokens_s))
    return layout.total_bytes, found, copy_s(slot.buffer), step_s


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


def quartiles(values):
    return dict(zip(("lower", "median", "upper"), statistics.quantiles(values, n=4), strict=True))


def summary(updates, copied_s, step_s):
    """Medians of the steps, the ratio, and quartiles of the stall and of what a request loses."""
    return {
        "median_s": {step: statistics.median(each[step] for each in updates) for step in STEPS},
        "ratio": copied_s / statistics.median(each["stage"] + each["load"] for each in updates),
        "stall_s": quartiles([each["pause"] + each["load"] + each["resume"] for each in updates]),
        "lost_s": quartiles([each["gap"] - step_s for each in updates]),
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
            assert sender.stdout is not None
            source = msgpack.unpackb(receive(sender.stdout))
            total_bytes, found, copied_s, step_s = asyncio.run(measure(arguments, source))
        finally:
            sender.kill()
    result = {
        "workload": {
            "model": arguments.model,
            "device": arguments.device,
            "dtype": arguments.dtype,
            "bytes": total_bytes,
            "updates": arguments.updates,
            "running": 65,
        },
        "environment": describe(engine_package(), "torch"),
        "copy_s": copied_s,
        "step_s": step_s,
        **{transport: summary(updates[1:], copied_s, step_s) for transport, updates in found.items()},
    }
    report(result, arguments.json)


if __name__ == "__main__":
    main()
