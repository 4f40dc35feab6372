"""The row about the learner: its speed, and its memory against the plan."""

import statistics
import time
from collections.abc import Iterator

import torch

from asyncrl.config.load import load_config
from asyncrl.hosting.machine import this_machine
from asyncrl.preflight.fit import read_trained_shape
from asyncrl.preflight.forecast import forecast
from asyncrl.trainer.meter import is_known, peak_flops_per_s, step_flops
from bench.gpu.figures import Figure, Place, absent, judged, noted
from bench.gpu.training_rate import lone_trainer, rollouts, step_of

STEPS = 5  # after one that warms up
SEQUENCES = {"cuda": 256, "cpu": 16}
LENGTH = {"cuda": 1024, "cpu": 128}  # of the longest; the median response has a sixth of it
LEAST_MFU = 0.12  # of a model of 0.5B, see docs/gpu.md
MOST_OF_PLAN = 1.1
# Lines of a plan that torch's allocator accounts for.
PLANNED = ("learner weights", "gradients", "optimizer", "activations", "output layer", "buffers")


def learner(place: Place) -> Iterator[Figure]:
    """Take optimizer steps on made-up rollouts."""
    config = load_config(place.directory / "task.yaml")
    shape = read_trained_shape(config.model, config.learner)
    items = rollouts(SEQUENCES[place.device], shape.vocabulary, LENGTH[place.device], seed=0)
    trainer = lone_trainer(place.model, config.learner, dtype=config.model.dtype, auto=place.device)
    step = step_of(trainer, items, config.learner.tokens_per_microbatch)
    step()
    seconds = []
    for _ in range(STEPS):
        started_s = time.perf_counter()
        norm = step()
        seconds.append(time.perf_counter() - started_s)
    tokens, step_s = sum(one.tokens for one in items), statistics.median(seconds)
    yield judged("gradient norm", norm, at_least=0, note="a finite number")
    yield noted("speed", tokens / step_s, "tokens/s", note=f"{tokens} tokens, {step_s:.3g} s a step")
    flops = step_flops(shape, [one.tokens for one in items], sum(len(one.response_ids) for one in items))
    yield noted("floating-point operations", flops / step_s / 1e12, "TFLOP/s")
    if not place.on_gpu:
        yield absent("MFU, peak memory against the plan", "a rehearsal on the CPU")
        return
    name = torch.cuda.get_device_name()
    peak = peak_flops_per_s(name)
    if peak is None or not is_known(shape):
        yield absent("MFU", f"the peak of {name}, or the operations of this model, are not known")
    else:
        yield place.speed("MFU", flops / step_s / peak, at_least=LEAST_MFU, note=f"{peak / 1e12:g} TFLOP/s")
    planned = forecast(config, shape, this_machine(config.learner.device), rows=None)
    planned_bytes = sum(planned[line] for line in PLANNED)
    peak_bytes = torch.cuda.max_memory_allocated()
    note = f"{peak_bytes / 2**30:.3g} of {planned_bytes / 2**30:.3g} GiB"
    yield judged("peak memory of the plan", peak_bytes / planned_bytes, at_most=MOST_OF_PLAN, note=note)
