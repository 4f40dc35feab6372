"""Whether `torch.compile` on the layers before the head pays: the learner's step with and without, in turn.

The learner does not compile them. A small Qwen2 of four layers trains on micro-batches of 6 to 13 packed
sequences, one per optimizer step. On a CPU one operator stands in for the GPU's attention kernel, because
the CPU's attention makes one call per sequence. "ratio" is the time of a step without ÷ with compiling.

    OMP_NUM_THREADS=1 python -m bench.layers [--json bench/results/layers.json]
    python -m bench.layers --device cuda --dtype bfloat16
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import asyncrl  # noqa: F401 - before transformers: it hides builds that transformers cannot import

# isort: split
from transformers import AttentionInterface

from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.config.sections import LearnerConfig
from asyncrl.trainer.attention import repeated
from asyncrl.trainer.deepspeed.trainer import DeepSpeedTrainer
from bench.environment import add_options, describe, report
from bench.gpu.training_rate import lone_trainer, rollouts, step_of
from tests.support.models import tiny_qwen2

VOCABULARY, LIMIT = 512, 128
SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4, "num_key_value_heads": 2}
OPERATOR = "bench_operator"


@torch.library.custom_op("bench::attend", mutates_args=())
def attend(query_HND: Tensor, key_HND: Tensor, value_HND: Tensor, starts: Tensor, scale: float) -> Tensor:
    """Causal attention within each sequence. An operator, so that the compiler cannot change it."""
    return probabilities(query_HND, key_HND, starts, scale) @ value_HND


@torch.library.custom_op("bench::attend_backward", mutates_args=())
def attend_backward(
    gradient_HND: Tensor, query_HND: Tensor, key_HND: Tensor, value_HND: Tensor, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    share_HNN = probabilities(query_HND, key_HND, starts, scale)
    of_share_HNN = gradient_HND @ value_HND.mT
    of_score_HNN = share_HNN * (of_share_HNN - (share_HNN * of_share_HNN).sum(-1, keepdim=True)) * scale
    return of_score_HNN @ key_HND, of_score_HNN.mT @ query_HND, share_HNN.mT @ gradient_HND


def probabilities(query_HND: Tensor, key_HND: Tensor, starts: Tensor, scale: float) -> Tensor:
    place_N = torch.arange(query_HND.shape[1])
    sequence_N = torch.bucketize(place_N, starts, right=True)
    seen_NN = (place_N[:, None] >= place_N) & (sequence_N[:, None] == sequence_N)
    return (query_HND @ key_HND.mT * scale).masked_fill(~seen_NN, float("-inf")).softmax(-1)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def gradients(context: Any, gradient_HND: Tensor) -> tuple[Tensor | None, ...]:
    return (*attend_backward(gradient_HND, *context.saved_tensors, context.scale), None, None)


attend.register_fake(lambda query_HND, *_: torch.empty_like(query_HND))
attend_backward.register_fake(
    lambda gradient_HND, query_HND, key_HND, value_HND, *_: tuple(
        map(torch.empty_like, (query_HND, key_HND, value_HND))
    )
)
attend.register_autograd(gradients, setup_context=save_inputs)


def as_operator(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`attend` as transformers calls an attention."""
    key_1HND, value_1HND = (repeated(each, query_1HND) for each in (key_1HND, value_1HND))
    columns = (column_1HND[0].contiguous() for column_1HND in (query_1HND, key_1HND, value_1HND))
    output_HND: Tensor = attend(*columns, cu_seq_lens_q, scaling)
    return output_HND.transpose(0, 1)[None], None


def measure(
    model: str, learner: LearnerConfig, microbatches: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One trainer, whose layers are compiled in every second step."""
    torch._dynamo.reset()
    counters.clear()
    trainer = lone_trainer(model, learner, dtype=options.dtype, auto=options.device)
    assert isinstance(trainer, DeepSpeedTrainer)
    layers = trainer._policy.engine.module.model.base_model.layers
    calls = {"plain": [None for _ in layers], "compiled": []}
    for layer in layers:
        layer.compile(dynamic=True)
        calls["compiled"].append(layer._compiled_call_impl)
    draw = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    norms: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(microbatches):
        items = rollouts(draw.randint(6, 13), VOCABULARY, LIMIT, seed=number)
        step = step_of(trainer, items, sum(one.tokens for one in items))
        for name, of_layers in calls.items():
            for layer, call in zip(layers, of_layers, strict=True):
                layer._compiled_call_impl = call
            started_s = time.perf_counter()
            norms[name].append(step())
            seconds[name].append(time.perf_counter() - started_s)
    trainer.close()
    ratios = [p / c for p, c in zip(seconds["plain"][1:], seconds["compiled"][1:], strict=True)]
    return {
        "zero_stage": learner.zero_stage,
        "gradient_checkpointing": learner.gradient_checkpointing,
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "first_step_s": round(seconds["compiled"][0], 1),
        "ratio": round(statistics.median(ratios), 2),
        "norms_differ": max(abs(c / p - 1) for p, c in zip(*norms.values(), strict=True)),
    }


def settings(device: Literal["cpu", "cuda"]) -> Iterator[LearnerConfig]:
    for zero_stage in (0, 3):
        for checkpointing in (False, True):
            yield LearnerConfig(
                device=device,
                threads=1,
                zero_stage=zero_stage,
                gradient_checkpointing=checkpointing,
                optimizer=OptimizerConfig(lr=1e-12),
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, default=12)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "cpu":
        AttentionInterface.register(OPERATOR, as_operator)
        mock.patch("asyncrl.trainer.loading.choose_attention", lambda *args, **kwargs: OPERATOR).start()
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_qwen2(Path(directory), tied=False, vocab_size=VOCABULARY, num_hidden_layers=4, **SIZES)
        rows = [measure(str(model), one, options.microbatches, options) for one in settings(options.device)]
    where = {"device": options.device, "dtype": options.dtype}
    report({**describe("torch", "deepspeed", "transformers"), **where, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
