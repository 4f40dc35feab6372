"""Learner tokens per second: the trainer against a plain padded torch loop, same rollouts, loss and
optimizer, in one run.

    OMP_NUM_THREADS=1 python -m bench.learner --model MODEL_DIRECTORY --json bench/results/learner.json
    python -m bench.learner --model MODEL_DIRECTORY --device cuda --dtype bfloat16

Tokens are prompt and response tokens of the rollouts, without padding, for both. One thread each. The plain
loop is what one writes first: micro-batches of a fixed number of sequences in the order they come, padded to
their longest, full logits. The two alternate, and the median of the repetitions counts. The gradient norms
are compared, so that both did the same work.

"dispatches" are the operators, but for views, that the host starts for one micro-batch of so many sequences,
forward and backward: on 24 layers of Qwen2 in bfloat16, counted on tensors without numbers.

"kept" is a step of ours on rollouts that were sampled among a few tokens (`sampling.top_k`), 8 in the mean
and 50 at most: the bytes that record these, and the step's time relative to one among all tokens. On a CPU,
all seconds are of the processor, which other programs change little.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import asyncrl  # noqa: F401 - before transformers: it hides builds that transformers cannot import

# isort: split
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.batch.packing import TrainSample, pack
from asyncrl.columns import KEPT_COUNTS
from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.config.sections import LearnerConfig
from bench.environment import add_options, report
from bench.gpu.training_rate import clipped, lone_trainer, rollouts, step_of
from tests.support.dispatches import dispatches_of


def with_kept(items: list[TrainSample], vocabulary: int) -> list[TrainSample]:
    rng, found = np.random.default_rng(0), []
    for item in items:
        counts = rng.geometric(1 / 8, len(item.response_ids)).clip(max=50).astype(np.int32)
        ids = rng.integers(3, vocabulary, counts.sum(), dtype=np.int32)
        ids[np.cumsum(counts) - 1] = item.response_ids
        found.append(replace(item, recorded={KEPT_COUNTS: counts}, kept_ids=ids))
    return found


def our_steps(
    model: str, workloads: list[list[TrainSample]], budget: int, options
) -> tuple[list[Callable[[], float]], int]:
    learner = LearnerConfig(
        device=options.device, threads=1, optimizer=OptimizerConfig(lr=1e-6), tokens_per_microbatch=budget
    )
    trainer = lone_trainer(model, learner, dtype=options.dtype, auto=options.device)
    steps = [step_of(trainer, items, budget) for items in workloads]
    return steps, len(pack([one.tokens for one in workloads[0]], budget))


def plain_step(model: str, items: list[TrainSample], options) -> tuple[Callable[[], float], int]:
    width, device, dtype = options.width, torch.device(options.device), getattr(torch, options.dtype)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    total = sum(len(one.response_ids) for one in items)

    def one_microbatch(members: list[TrainSample]) -> None:
        longest = max(one.tokens for one in members)
        shape = (len(members), longest)
        ids, attended = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        behaviour, advantages, mask = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
        for row, one in enumerate(members):
            ids[row, : one.tokens] = torch.from_numpy(np.concatenate([one.prompt_ids, one.response_ids]))
            attended[row, : one.tokens] = 1
            answer = slice(len(one.prompt_ids), one.tokens)
            behaviour[row, answer] = torch.from_numpy(one.behaviour_logprobs)
            advantages[row, answer] = torch.from_numpy(one.advantages)
            mask[row, answer] = 1
        ids, attended = ids.to(device), attended.to(device)
        behaviour, advantages, mask = behaviour.to(device), advantages.to(device), mask.to(device)
        logits = policy(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ((clipped(logprobs, behaviour[:, 1:], advantages[:, 1:]) * mask[:, 1:]).sum() / total).backward()

    def step() -> float:
        for start in range(0, len(items), width):
            one_microbatch(items[start : start + width])
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)  # waits for the GPU

    return step, -(-len(items) // width)


def measure(
    steps: dict[str, Callable[[], float]], repetitions: int, clock: Callable[[], float]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    norms = {name: step() for name, step in steps.items()}  # warm-up, and the check that both do the same
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            started_s = clock()
            step()
            seconds[name].append(clock() - started_s)
    return seconds, norms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--width", type=int, default=8, help="sequences of one padded micro-batch")
    parser.add_argument("--repetitions", type=int, default=3)
    add_options(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(arguments.model)
    limit = min(config.max_position_embeddings, 512)
    items = rollouts(arguments.sequences, config.vocab_size, limit, seed=0)
    tokens = sum(one.tokens for one in items)
    padded = sum(
        len(items[i : i + arguments.width]) * max(one.tokens for one in items[i : i + arguments.width])
        for i in range(0, len(items), arguments.width)
    )
    kept = with_kept(items, config.vocab_size)
    recorded = [column for one in kept for column in (one.kept_ids, one.recorded[KEPT_COUNTS])]
    kept_bytes = sum(column.nbytes for column in recorded if column is not None)
    (ours, among_kept), our_microbatches = our_steps(
        arguments.model, [items, kept], max(limit, padded * arguments.width // len(items)), arguments
    )
    plain, plain_microbatches = plain_step(arguments.model, items, arguments)
    steps = {"asyncrl": ours, "plain": plain, "kept": among_kept}
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    seconds, norms = measure(steps, arguments.repetitions, clock)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    result: dict[str, Any] = {
        "workload": {
            "model": Path(arguments.model).name,
            "device": arguments.device,
            "dtype": arguments.dtype,
            "parameters_tied": bool(config.tie_word_embeddings),
            "sequences": len(items),
            "tokens": tokens,
            "padded_tokens": padded,
            "action_tokens": sum(len(one.response_ids) for one in items),
            "microbatches": {"asyncrl": our_microbatches, "plain": plain_microbatches},
        },
        "tokens_per_s": {name: tokens / median[name] for name in ("asyncrl", "plain")},
        "ratio": median["plain"] / median["asyncrl"],
        "ratio_by_repetition": [p / a for p, a in zip(seconds["plain"], seconds["asyncrl"], strict=True)],
        "kept": {
            "bytes_per_token": kept_bytes / sum(len(one.response_ids) for one in items),
            "time_ratio": median["kept"] / median["asyncrl"],
            "by_repetition": [k / a for k, a in zip(seconds["kept"], seconds["asyncrl"], strict=True)],
        },
        "seconds": seconds,
        "grad_norm": norms,
        "dispatches": {str(sequences): dispatches_of(sequences) for sequences in (4, 110)},
        "load_average": os.getloadavg(),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "threads": 1},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    report(result, arguments.json)


if __name__ == "__main__":
    main()
