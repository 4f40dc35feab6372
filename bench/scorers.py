"""Calls per second of a scorer beside vLLM's pooling alone, for the same rows.

    python -m bench.scorers --model MODEL [--rows 256] [--tokens 64] [--turns 12]
        [--json bench/results/scorers.json]

The reward model is MODEL with a random output. A scorer runs as in a run, and is asked as a
generator asks it, with 256 calls in flight; vLLM alone gets all rows in one call of `LLM.encode`. Both are
loaded, with the same arguments and one thread, and take turns in the same run. No row is asked twice. The
ratio is that of the best turns, because other work on the machine only lowers a rate. `cpu_s` is the CPU time
of all processes per call, of the median turn.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncrl  # noqa: F401 - before transformers: it hides builds that transformers cannot import

# isort: split
import numpy as np
import psutil
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from asyncrl.config.schema import Config
from asyncrl.engine.vllm.args import set_environment
from asyncrl.engine.vllm.classifier import classifier_args
from asyncrl.launch.scorers import scorers_in, started_scorers
from asyncrl.rewards.base import RewardInput
from asyncrl.rewards.opened import AT_ONCE, Rewards
from bench.environment import add_options, describe, engine_package, report

Rows = list[list[int]]


def reward_model(model: str, directory: Path) -> Path:
    """Write a classifier with one label and the tokenizer of the model."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(directory)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    made = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, pad_token_id=pad)
    made.save_pretrained(directory)
    return directory


def bare(config: Config, device: Any) -> Callable[[Rows], list[float]]:
    """Start vLLM with the scorer's arguments; the result scores all rows in one call."""
    set_environment(config.generator, device=device)
    from vllm import LLM, PoolingParams

    most = config.sampling.max_tokens
    arguments = classifier_args(
        config.scorers["rm"].model, config.model.dtype, config.generator, max_tokens=most, device=device
    )
    llm: Any = LLM(**arguments)
    params = PoolingParams(task="classify", use_activation=False)

    def score(rows: Rows) -> list[float]:
        inputs: list[Any] = [{"prompt_token_ids": ids} for ids in rows]
        outputs = llm.encode(inputs, params, use_tqdm=False, pooling_task="classify")
        return [float(output.outputs.data) for output in outputs]

    return score


def cpu_s() -> float:
    """CPU time so far of this process and those that it started, which all live until the end."""
    ours = psutil.Process()
    times = [process.cpu_times() for process in (ours, *ours.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def measure(arguments: argparse.Namespace, config: Config, directory: Path) -> dict[str, Any]:
    draw, score_bare = np.random.default_rng(0), bare(config, arguments.device)
    rewards = Rewards(config.reward, directory, open_scorer=scorers_in(config, directory))
    await rewards.start()

    async def ask(rows: Rows) -> list[float]:
        inputs = [RewardInput(prompt="", response="", row={}, token_ids=ids) for ids in rows]
        return [one.total for one in await rewards.score(inputs)]

    async def ask_bare(rows: Rows) -> list[float]:
        return score_bare(rows)

    sides: dict[str, Callable[[Rows], Awaitable[list[float]]]] = {"bare": ask_bare, "scorer": ask}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    spent_s: dict[str, list[float]] = {name: [] for name in sides}
    differences = []
    try:
        for turn in range(arguments.turns + 1):  # the first one warms up
            rows = draw.integers(3, 400, size=(arguments.rows, arguments.tokens)).tolist()
            found = []
            for name, side in sides.items():
                cpu_before_s, started_s = cpu_s(), time.perf_counter()
                found.append(await side(rows))
                took_s, used_s = time.perf_counter() - started_s, cpu_s() - cpu_before_s
                rates[name] += [arguments.rows / took_s] if turn else []
                spent_s[name] += [used_s / arguments.rows] if turn else []
            differences.append(float(np.abs(np.subtract(found[0], found[1])).max()))
    finally:
        await rewards.close()
    best = {name: max(rate) for name, rate in rates.items()}
    cpu = {name: statistics.median(used_s) for name, used_s in spent_s.items()}
    return {
        "workload": {name: value for name, value in vars(arguments).items() if name != "json"},
        "in_flight": AT_ONCE,
        "environment": describe(engine_package(), "torch"),
        "calls_per_s": {name: round(rate, 1) for name, rate in best.items()},
        "cpu_s": {name: round(used_s, 6) for name, used_s in cpu.items()},
        "ratio": {
            "calls_per_s": round(best["scorer"] / best["bare"], 3),
            "cpu_s": round(cpu["scorer"] / cpu["bare"], 3),
        },
        "largest_difference": max(differences),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=12)
    add_options(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        values = {
            "run": {"name": "scorers", "root": place},
            "model": {"path": arguments.model, "dtype": arguments.dtype},
            "data": {"train": "none.jsonl"},
            "reward": {
                "functions": [{"function": "model_score", "params": {"scorer": "rm"}}],
                "timeout_s": 300.0,
            },
            "sampling": {"max_prompt_tokens": 8, "max_response_tokens": arguments.tokens},
            "generator": {"threads": 1},
            "learner": {"device": arguments.device},
            "scorers": {"rm": {"model": str(reward_model(arguments.model, Path(place) / "rm"))}},
        }
        config = Config.model_validate(values)
        with started_scorers(config) as directory:
            result = asyncio.run(measure(arguments, config, directory))
    report(result, arguments.json)


if __name__ == "__main__":
    main()
