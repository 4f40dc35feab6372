"""Updates of an adapter beside those of the whole model, and sampling with an adapter beside merged weights.

    python -m bench.lora --model build/stories15m/model [--rank 16] [--updates 10] [--turns 3]
        [--json bench/results/lora.json]

Two engines, one with `model.lora` and one without, take turns in the same run. An update comes from memory of
this host while requests run: `stage_s` verifies it, `wait_s` is the wait for the end of the step under way,
`load_s` the load. `paused_s` is the whole pause, and `beyond_step_s` the pause without the wait. Ratios are
adapter ÷ whole model, of medians. The engine with whole weights samples as one with merged weights does.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import asyncrl  # noqa: F401 - before transformers: it hides builds that transformers cannot import

# isort: split
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.sections import LoraConfig
from asyncrl.engine.base import Engine
from asyncrl.engine.open import open_engine
from asyncrl.lora import adapter_tensors, inject
from asyncrl.weights.base import TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout, checksums
from asyncrl.weights.slots import Slot
from asyncrl.weights.staging import HostStaging
from bench.environment import add_options, describe, engine_package, report
from bench.gpu.sampling_rate import Load, sampled_per_s

TARGETS = ("adapter", "weights")
TIMES = ("stage_s", "wait_s", "load_s", "paused_s", "beyond_step_s")


def versions(arguments: argparse.Namespace) -> dict[str, tuple[Slot, UpdateOrder]]:
    """A slot with the adapter and one with the whole model, and the orders to load them."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    inject(model, LoraConfig(rank=arguments.rank))
    adapter = {name: 0.01 * torch.randn_like(parameter) for name, parameter in adapter_tensors(model)}
    made = {}
    for target, tensors in zip(TARGETS, (adapter, whole), strict=True):
        specs = [
            TensorSpec(name=name, dtype=arguments.dtype, shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        ]
        layout = Layout.plan(specs, 64 << 20)
        slot = Slot.create(layout.total_bytes)
        for index, tensor in enumerate(tensors.values()):
            layout.view(slot.buffer, index).copy_(tensor)
        slot.complete(1)
        details = {"slot": slot.describe(), "layout": layout.to_plain()}
        order = UpdateOrder(
            version=0,
            transport="slot",
            deadline_s=60.0,
            details=details | {"checksums": list(checksums(slot.buffer, layout))},
            probe_ids=(),
            probe_logprobs=(),
            initial_logprobs=(),
            target=target,
            size_bytes=layout.total_bytes,
        )
        made[target] = slot, order
    return made


async def update(engine: Engine, order: UpdateOrder, staging: HostStaging) -> dict[str, float]:
    """Apply an order as a generator does; return seconds."""
    paused_s, started_s = engine.stats().paused_s, time.perf_counter()
    ready = await asyncio.to_thread(staging.stage, order)
    staged_s = time.perf_counter()
    await engine.begin_update()
    begun_s = time.perf_counter()
    await engine.receive(ready)
    loaded_s = time.perf_counter()
    await engine.finish_update(order.weights)
    paused_s = engine.stats().paused_s - paused_s
    wait_s, load_s = begun_s - staged_s, loaded_s - begun_s
    seconds = (staged_s - started_s, wait_s, load_s, paused_s, paused_s - wait_s)
    return dict(zip(TIMES, seconds, strict=True))


async def updates_under_load(
    engine: Engine, orders: Iterator[UpdateOrder], sampling: Callable[[], Awaitable[float]]
) -> list[dict[str, float]]:
    """Apply the orders one after the other while requests run; the first update is not counted."""

    async def forever() -> None:
        while True:
            await sampling()

    staging, running = HostStaging(Path("/")), asyncio.create_task(forever())
    found = []
    for order in orders:
        await engine.progress()
        found.append(await update(engine, order, staging))
    running.cancel()
    await asyncio.wait({running})
    await engine.abort_requests()
    return found[1:]


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    made = versions(arguments)
    named = {name: getattr(arguments, name) for name in ("model", "device", "dtype", "running")}
    load = Load(**named, memory_share=0.4 if arguments.device == "cuda" else None)  # two engines
    parts: Any
    model, *parts = load.parts()
    adapted = model.model_copy(update={"lora": LoraConfig(rank=arguments.rank)})
    sides = zip(TARGETS, (adapted, model), strict=True)
    engines = {target: await open_engine(each, *parts, device=arguments.device) for target, each in sides}
    rates: dict[str, list[float]] = {target: [] for target in TARGETS}
    updates: dict[str, list[dict[str, float]]] = {target: [] for target in TARGETS}
    numbers = itertools.count(1)
    try:
        for turn in range(arguments.turns + 1):  # the first one warms up
            for target, engine in engines.items():
                sampling = partial(sampled_per_s, engine, load, arguments.prompts)
                rates[target] += [rate for rate in [await sampling()] if turn]
                each = (replace(made[target][1], version=next(numbers)) for _ in range(arguments.updates + 1))
                updates[target] += await updates_under_load(engine, each, sampling) if turn else []
    finally:
        for engine in engines.values():
            await engine.close()
    found = {
        target: {name: statistics.median(each[name] for each in updates[target]) for name in TIMES}
        | {"bytes": made[target][1].size_bytes, "tokens_per_s": statistics.median(rates[target])}
        for target in TARGETS
    }
    adapter, whole = (found[target] for target in TARGETS)
    return {
        "workload": {name: value for name, value in vars(arguments).items() if name != "json"},
        "environment": describe(engine_package(), "torch", "peft"),
        **found,
        "ratio": {name: round(adapter[name] / whole[name], 4) for name in adapter},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--running", type=int, default=64)
    add_options(parser)
    arguments = parser.parse_args()
    report(asyncio.run(measure(arguments)), arguments.json)


if __name__ == "__main__":
    main()
