"""Predicts memory and disk use of a run's processes, line by line, each with its formula."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.config import registry
from asyncrl.config.schema import Config
from asyncrl.launch.gpus import generator_gpus, learner_gpus
from asyncrl.preflight.machine import Machine
from asyncrl.telemetry.text import data_size
from asyncrl.trainer.deepspeed.memory_use import (
    DTYPE_BYTES,
    ModelShape,
    activations_bytes,
    checkpoint_bytes,
    kv_bytes_per_token,
    trained_bytes,
    weights_bytes,
)

GIB = 1 << 30
# Private memory without the model: of a rank with its sender, and of a generator with its engine and rewards.
LEARNER_LIBRARIES_BYTES, GENERATOR_LIBRARIES_BYTES = int(0.8 * GIB), int(1.6 * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A number of the forecast."""

    section: str
    name: str
    value: float
    shown: str
    formed: str


def count_line(section: str, name: str, value: float, formed: str) -> Line:
    """A line with a count."""
    shown = f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return Line(section=section, name=name, value=value, shown=shown, formed=formed)


def bytes_line(section: str, name: str, value: int, formed: str) -> Line:
    """A line with a size in bytes."""
    return Line(section=section, name=name, value=value, shown=data_size(value), formed=formed)


def memory_lines(config: Config, shape: ModelShape, machine: Machine) -> Iterator[Line]:
    """Memory of the model, of a learner rank, of a generator, and of this host with all of them."""
    formed = "of the architecture in config.json, built without memory; tied ones once"
    yield count_line("the model", "parameters", shape.parameters, formed)
    size = DTYPE_BYTES[config.model.dtype]
    yield bytes_line(
        "the model",
        "weights",
        weights_bytes(shape, config.model),
        f"parameters x {size} ({config.model.dtype})",
    )
    rank, on_gpu, generator = _rank_bytes(config, shape), _on_gpu(config, machine), config.generator
    kv_bytes = int(generator.kv_cache_gib * GIB)
    if on_gpu:
        weights = -(-weights_bytes(shape, config.model) // generator.tensor_parallel)
        kv_bytes = max(0, int(generator.gpu_memory_utilization * min(machine.gpu_bytes)) - weights)
    yield from _rank_lines(config, rank)
    yield from _generator_lines(config, shape, kv_bytes, on_gpu=on_gpu)
    yield from _host_lines(config, shape, sum(rank.values()), kv_bytes, machine)


def disk_lines(config: Config, shape: ModelShape) -> Iterator[Line]:
    """Disk space of the checkpoints."""
    one = checkpoint_bytes(shape, config.model, critic=_needs(config, "values_T"))
    critic = ", as much for the critic" if _needs(config, "values_T") else ""
    yield bytes_line(
        "this host", "checkpoint", one, f"weights, optimizer, Hugging Face export: parameters x 16{critic}"
    )
    kept = config.checkpoint.keep
    yield bytes_line(
        "this host", "disk", one * (kept + 1), f"checkpoint x (keep {kept} + the one being written)"
    )


def _on_gpu(config: Config, machine: Machine) -> bool:
    return bool(machine.gpu_bytes) and config.learner.device != "cpu"


def _needs(config: Config, column: str) -> bool:
    return column in registry.needs("advantage", config.algorithm.advantage.name)


def _rank_bytes(config: Config, shape: ModelShape) -> dict[str, int]:
    parts = trained_bytes(shape, config.model, config.learner)
    models = {
        "learner weights": parts["weights"],
        "gradients": parts["gradients"],
        "optimizer": parts["optimizer"],
    }
    models["activations"] = activations_bytes(shape, config.model, config.learner)
    if config.algorithm.kl.coefficient or _needs(config, "reference_logprobs_T"):
        models["reference"] = parts["weights"]
    if _needs(config, "values_T"):
        models["critic"] = sum(parts.values())
    return models


def _rank_lines(config: Config, rank: dict[str, int]) -> Iterator[Line]:
    learner, half = config.learner, config.model.dtype == "bfloat16"
    sharded = f", what ZeRO {learner.zero_stage} shards / {learner.ranks} ranks" if learner.ranks > 1 else ""
    master = half or learner.zero_stage > 0
    formed = {
        "learner weights": f"as above{sharded}",
        "gradients": "parameters x 4, accumulated in float32"
        + (", x 2 of one backward pass" if half else "")
        + sharded,
        "optimizer": "AdamW: parameters x 8"
        + (", x 4 of the float32 master copy" if master else "")
        + sharded,
        "activations": "estimate: tokens_per_microbatch x what layers keep, and the logits of one chunk",
        "reference": "weights, because of algorithm.kl",
        "critic": "weights, gradients and optimizer of a model like the policy",
    }
    for name, value in rank.items():
        yield bytes_line("a rank of the learner", name, value, formed[name])
    yield bytes_line("a rank of the learner", "one rank", sum(rank.values()), "all of these")


def _generator_lines(config: Config, shape: ModelShape, kv_bytes: int, *, on_gpu: bool) -> Iterator[Line]:
    part, parallel = "a generator", config.generator.tensor_parallel
    by = f" / {parallel} (tensor_parallel)" if parallel > 1 else ""
    weights, token = weights_bytes(shape, config.model), kv_bytes_per_token(shape, config.model)
    sequence = -(-token * config.sampling.max_tokens // parallel)
    yield bytes_line(part, "generator weights", -(-weights // parallel), f"weights{by}")
    formed = "gpu_memory_utilization x GPU - weights" if on_gpu else "generator.kv_cache_gib"
    yield bytes_line(part, "KV cache", kv_bytes, formed)
    formed = (
        f"2 x {shape.layers} layers x {shape.kv} x {DTYPE_BYTES[config.model.dtype]} = {token:,} bytes a "
        f"token{by}"
    )
    yield bytes_line(part, "KV of a sequence", sequence, formed)
    formed = f"KV cache / KV of a sequence; max_running is {config.generator.max_running}"
    yield count_line(part, "full sequences in KV", kv_bytes // sequence, formed)


def _host_lines(
    config: Config, shape: ModelShape, rank: int, kv_bytes: int, machine: Machine
) -> Iterator[Line]:
    ranks, count, weights = config.learner.ranks, config.generator.count, weights_bytes(shape, config.model)
    host = ranks * LEARNER_LIBRARIES_BYTES + count * GENERATOR_LIBRARIES_BYTES + 2 * weights
    formed = f"libraries ({ranks} x 0.8 + {count} x 1.6 GiB), two published copies of the weights"
    if not _on_gpu(config, machine):
        host += ranks * rank + count * (2 * weights + kv_bytes)
        formed += ", ranks, generators with one staged copy each"
    yield bytes_line(
        "this host", "host memory", host, f"{formed}; {data_size(machine.memory_bytes)} available"
    )
    if _on_gpu(config, machine):
        for index, size_bytes in enumerate(machine.gpu_bytes):
            formed = f"of {data_size(size_bytes)}: ranks, and gpu_memory_utilization of each generator"
            yield bytes_line("this host", f"GPU {index}", _gpu_bytes(config, rank, machine)[index], formed)


def _gpu_bytes(config: Config, rank: int, machine: Machine) -> Counter[int]:
    gpus, ranks, generator = len(machine.gpu_bytes), config.learner.ranks, config.generator
    used: Counter[int] = Counter()
    learners = learner_gpus(gpus, ranks)
    for index in learners:
        used[index] += rank * math.ceil(ranks / len(learners))
    for number in range(generator.count):
        for index in generator_gpus(gpus, number, ranks=ranks, width=generator.tensor_parallel):
            used[index] += int(generator.gpu_memory_utilization * machine.gpu_bytes[index])
    return used
