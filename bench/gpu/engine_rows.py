"""Rows about the generator's engine: its start, its agreement with the learner, its speed."""

import asyncio
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.prompts import vocabulary_size
from asyncrl.engine.base import Engine, SamplingSpec
from asyncrl.engine.open import open_engine
from asyncrl.errors import DataError
from asyncrl.hosting.gpus import count_gpus, resolve_device, visible_devices
from asyncrl.hosting.placement import Seat, placement_of
from asyncrl.launch.generator_process import allotted
from asyncrl.trainer.loading import load_model
from asyncrl.trainer.policy import PolicyModule
from asyncrl.weights.agreement import EXPLAINED, Difference
from bench.bare_vllm import open_bare
from bench.gpu.figures import Figure, Place, figures_in, judged, noted
from bench.gpu.kit import row_argv
from bench.gpu.sampling_rate import Load, prompts, sampled_per_s

START_S = 180.0  # an engine that takes longer keeps a run waiting
# Of the row generator, which has the GPU to itself.
MEMORY_SHARE = 0.8
LEAST_RATIO = 0.97
# The best one counts. With few sequences a measurement takes less than a second.
REPEATS = {64: 6, 256: 3, 1024: 2}
WARM = 2  # prompts sampled before
PROBES, PROBE_TOKENS = 8, 32
Scores = NDArray[np.float32]


def engine(place: Place) -> Iterator[Figure]:
    """Start an engine as a generator does, sample, and compare its log-probabilities with the learner's."""
    config = load_config(place.directory / "task.yaml")
    known = range(3, vocabulary_size(config.model))
    sequences = [random.Random(seed).choices(known, k=PROBE_TOKENS) for seed in range(PROBES)]

    async def ask() -> tuple[float, int, list[Scores]]:
        started_s = time.perf_counter()
        async with running(config) as started:
            seconds = time.perf_counter() - started_s
            spec = SamplingSpec(temperature=1.0, max_response_tokens=8)
            rollouts = await started.sample(sequences[0], 4, spec)
            return seconds, len(rollouts), [await started.score(ids) for ids in sequences]

    seconds, sampled, scores = asyncio.run(ask())
    yield place.speed("start", seconds, "s", at_most=START_S, note="by a generator's own path")
    yield judged("responses to one request for 4", sampled, at_least=4)
    yield from _floor(sequences, config, scores)


def seat_of(config: Config) -> Seat:
    """Return the seat of the config's first generator on this machine."""
    return placement_of(config, count_gpus()).generators[0]


def seen_by(seat: Seat) -> dict[str, str]:
    """Return the variables with which a process sees the GPUs of the seat only."""
    return {"CUDA_VISIBLE_DEVICES": visible_devices(seat.gpus)} if seat.gpus else {}


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Engine]:
    """Start the engine of the config's first generator on the GPUs of its seat, and close it."""
    device, seat = resolve_device(config), seat_of(config)
    generator = allotted(config, seat.share if seat.gpus else None, is_shared=seat.is_shared)
    # The learner's part of the check, in this process, uses another GPU if there is one.
    with changed_environment(seen_by(seat)):
        started = await open_engine(config.model, generator, config.sampling, config.weights, device=device)
    try:
        yield started
    finally:
        await started.close()


@contextmanager
def changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Give these variables to the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _floor(sequences: Sequence[list[int]], config: Config, engines: Sequence[Scores]) -> Iterator[Figure]:
    """Compare the engine's log-probabilities with the learner's, which has the same weights."""
    device = torch.device(resolve_device(config))
    policy = PolicyModule(load_model(config.model, device))
    differences = []
    for ids, scores in zip(sequences, engines, strict=True):
        tokens = torch.tensor(ids, device=device)
        positions = torch.arange(len(ids), device=device)
        with torch.no_grad():
            columns_RT = policy(
                input_ids_N=tokens,
                position_ids_N=positions,
                sequence_starts=(0, len(ids)),
                source_T=positions[:-1],
                target_T=tokens[1:],
                temperature=1.0,
                chunk=1024,
            )
        differences.append(Difference.between(scores, columns_RT[0].float().tolist()))
    allowed = EXPLAINED[config.model.dtype]
    note = f"worst of {len(sequences)} sequences; at most what rounding explains"
    mean, largest = (max(getattr(each, name) for each in differences) for name in ("mean", "max"))
    yield judged("probe floor, mean", mean, "nats", at_most=allowed.mean, note=note)
    yield judged("probe floor, largest", largest, "nats", at_most=allowed.max, note=note)


def generator(place: Place) -> Iterator[Figure]:
    """Compare the engine's tokens per second with those of vLLM alone."""
    command = row_argv("vllm", f"{__name__}:bare", place.directory)
    if subprocess.run(command, check=False).returncode:
        raise DataError("vLLM alone did not sample; this row's log says why")
    load = _load(place)

    async def measure() -> list[float]:
        started = await open_engine(*load.parts(), device=place.device)
        try:
            await sampled_per_s(started, load, WARM)
            return [
                max([await sampled_per_s(started, load, level // load.samples) for _ in range(count)])
                for level, count in REPEATS.items()
            ]
        finally:
            await started.close()

    rates = asyncio.run(measure())
    for level, rate, bare in zip(REPEATS, rates, figures_in(place.directory / "vllm.jsonl"), strict=True):
        assert bare.value is not None
        yield noted(f"{level} running", rate, "tokens/s", note=f"vLLM alone: {bare.value:.0f}")
        yield place.speed(f"{level} running, of vLLM alone", rate / bare.value, at_least=LEAST_RATIO)


def bare(place: Place) -> Iterator[Figure]:
    """Measure vLLM alone, in a process of its own."""
    load = _load(place)
    sample = open_bare(*load.parts(), device=place.device)
    sample(prompts(WARM), load.samples)
    for level, count in REPEATS.items():
        rates = []
        for _ in range(count):
            started_s = time.perf_counter()
            tokens = sample(prompts(level // load.samples), load.samples)
            rates.append(tokens / (time.perf_counter() - started_s))
        yield noted(f"{level} running", max(rates), "tokens/s")


def _load(place: Place) -> Load:
    return Load(
        model=place.model,
        device=place.device,
        dtype="bfloat16",
        running=max(REPEATS),
        tokens=256 if place.on_gpu else 4,
        memory_share=MEMORY_SHARE if place.on_gpu else None,
    )
