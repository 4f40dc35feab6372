"""Updates of an adapter beside those of the whole model, and sampling with an adapter beside merged weights.

    python -m bench.lora --model build/stories15m/model [--rank 16] [--updates 20] [--turns 3]
        [--json bench/results/lora.json]

Two engines, one with `model.lora` and one without, take turns in the same run; requests run in both. An
update comes from memory of this host: `stage_s` verifies it while requests run, `load_s` is the load within
the pause, `paused_s` the whole pause, which begins with the end of the step under way. Ratios are adapter ÷
whole model, of medians; for tokens per second, of the best turns.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from dataclasses import replace
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
from asyncrl.preflight.gpu.sampling_rate import Load, sampled_per_s
from asyncrl.weights.base import TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout, checksums
from asyncrl.weights.slots import Slot
from asyncrl.weights.staging import HostStaging
from bench.environment import add_options, describe, engine_package, report

TARGETS = ("adapter", "weights")
TIMES = ("stage_s", "load_s", "paused_s")


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
    seconds = (staged_s - started_s, loaded_s - begun_s, engine.stats().paused_s - paused_s)
    return dict(zip(TIMES, seconds, strict=True))


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    made = versions(arguments)
    load = Load(**{name: getattr(arguments, name) for name in ("model", "device", "dtype", "running")})
    model, *parts = load.parts()
    adapted = model.model_copy(update={"lora": LoraConfig(rank=arguments.rank)})
    sides = zip(TARGETS, (adapted, model), strict=True)
    engines = {target: await open_engine(each, *parts, device=arguments.device) for target, each in sides}
    rates: dict[str, list[float]] = {target: [] for target in TARGETS}
    updates: dict[str, list[dict[str, float]]] = {target: [] for target in TARGETS}
    staging, numbers = HostStaging(Path("/")), itertools.count(1)
    try:
        for turn in range(arguments.turns + 1):
            for target, engine in engines.items():
                rate = await sampled_per_s(engine, load, arguments.prompts)
                rates[target] += [rate] if turn else []  # the first one warms up
        for target, engine in engines.items():  # with requests running
            for _ in range(arguments.updates + 1):
                sampling = asyncio.create_task(sampled_per_s(engine, load, arguments.prompts))
                await asyncio.sleep(0)
                await engine.progress()
                order = replace(made[target][1], version=next(numbers))
                updates[target].append(await update(engine, order, staging))
                await engine.abort_requests()
                await asyncio.wait({sampling})
                sampling.exception()
    finally:
        for engine in engines.values():
            await engine.close()
    found = {
        target: {name: statistics.median(each[name] for each in updates[target][1:]) for name in TIMES}
        | {"bytes": made[target][1].size_bytes, "tokens_per_s": max(rates[target])}
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
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--running", type=int, default=64)
    add_options(parser)
    arguments = parser.parse_args()
    report(asyncio.run(measure(arguments)), arguments.json)


if __name__ == "__main__":
    main()
