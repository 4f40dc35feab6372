"""Tokens per second of the generator's engine beside bare vLLM, and what a weight update under running
requests costs.

    python -m bench.generator --model build/stories15m/model [--prompts 64] [--samples 8] [--tokens 128]
        [--device cuda --dtype bfloat16] [--json bench/results/generator.json]

Each side runs in its own processes, one after the other and by turns; the same prompts, sampling and engine
arguments. The ratio is that of the best runs. Stalls are the engine's paused time per update from disk, with
requests running.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asyncrl.engine.open import open_engine
from asyncrl.lineage import Weights
from asyncrl.weights.base import UpdateOrder
from asyncrl.weights.slots import Slot
from bench.bare_vllm import open_bare
from bench.environment import add_options, describe, engine_package, report
from bench.gpu.sampling_rate import PROMPT_TOKENS, Load, prompts, sampled_per_s
from bench.stall import version_of


def load_of(arguments):
    names = ("model", "device", "dtype", "running", "samples", "tokens", "threads")
    return Load(**{name: getattr(arguments, name) for name in names})


def bare(arguments):
    """vllm.LLM.generate with all prompts in one call. Returns tokens per second of each repeat."""
    sample = open_bare(*load_of(arguments).parts(), device=arguments.device)
    rates = []
    for _ in range(arguments.repeats):
        started_s = time.perf_counter()
        tokens = sample(prompts(arguments.prompts), arguments.samples)
        rates.append(tokens / (time.perf_counter() - started_s))
    return {"tokens_per_s": rates}


async def ours(arguments):
    """VLLMEngine.sample, one call per prompt; then again with updates under way."""
    load = load_of(arguments)
    engine = await open_engine(*load.parts(), device=arguments.device)
    try:
        rates = [await sampled_per_s(engine, load, arguments.prompts) for _ in range(arguments.repeats)]
        stalls_s = await stalls(engine, arguments)
    finally:
        await engine.close()
    return {"tokens_per_s": rates, "stalls_s": stalls_s}


async def stalls(engine, arguments):
    sampling = asyncio.create_task(sampled_per_s(engine, load_of(arguments), arguments.prompts))
    layout, buffer = version_of(arguments.model, arguments.dtype)
    slot = Slot.create(layout.total_bytes)
    slot.buffer.copy_(buffer)
    slot.complete(1)
    details = {"slot": slot.describe(), "layout": layout.to_plain(), "checksums": [0] * len(layout.specs)}
    found = []
    for version in range(1, 6):
        await asyncio.sleep(0.3)
        before_s = engine.stats().paused_s
        order = UpdateOrder(
            version=version,
            transport="slot",
            deadline_s=60.0,
            details=details,
            probe_ids=(),
            probe_logprobs=(),
            initial_logprobs=(),
        )
        await engine.begin_update()
        await engine.receive(order)
        await engine.finish_update(Weights(version))
        found.append(engine.stats().paused_s - before_s)
    await sampling
    return found


def run_side(side):
    """This script again, in a process of its own; the result comes back through a file."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "side.json"
        subprocess.run(
            [sys.executable, "-m", "bench.generator", *sys.argv[1:], "--side", side, "--json", str(out)],
            check=True,
            timeout=900,
        )
        return json.loads(out.read_text())


def compare(arguments):
    turns = [(run_side("bare"), run_side("ours")) for _ in range(arguments.turns)]
    bare_rates = [max(bare["tokens_per_s"]) for bare, _ in turns]
    our_rates = [max(ours["tokens_per_s"]) for _, ours in turns]
    model_bytes = sum(file.stat().st_size for file in Path(arguments.model).glob("*.safetensors"))
    return {
        "workload": {k: v for k, v in vars(arguments).items() if k not in ("side", "json")}
        | {"prompt_tokens": PROMPT_TOKENS},
        "environment": describe(engine_package(), "torch"),
        "bare_tokens_per_s": bare_rates,
        "engine_tokens_per_s": our_rates,
        "ratio": max(our_rates) / max(bare_rates),
        "model_bytes": model_bytes,
        "stall_per_update_s": statistics.median(stall for _, ours in turns for stall in ours["stalls_s"]),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--side", choices=["bare", "ours"], help=argparse.SUPPRESS)
    add_options(parser)
    arguments = parser.parse_args()
    if arguments.side == "bare":
        result = bare(arguments)
    else:
        result = asyncio.run(ours(arguments)) if arguments.side else compare(arguments)
    report(result, arguments.json)


if __name__ == "__main__":
    main()
