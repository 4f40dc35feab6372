"""`asyncrl plan`: predicts batches, staleness, store and memory of a run, each number with its formula, and
warns of trouble."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asyncrl.config.resolved import wants_greedy
from asyncrl.config.schema import Config
from asyncrl.data.dataset import load_rows
from asyncrl.errors import DataError
from asyncrl.preflight.doubts import doubts
from asyncrl.preflight.footprint import Line, bytes_line, count_line, disk_lines, memory_lines
from asyncrl.preflight.machine import Machine, read_shape, this_machine
from asyncrl.preflight.validate import validated_config
from asyncrl.rewards.functions import ANSWER_CHARACTERS
from asyncrl.telemetry.text import data_size
from asyncrl.trainer.deepspeed.memory_use import ModelShape
from asyncrl.types import Group, Rollout, VersionSpan
from asyncrl.wire.group_frames import encode_group

TIGHT = 0.9  # share of a memory above which a warning calls it tight, since the numbers are estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Numbers of a run and warnings about them."""

    lines: tuple[Line, ...]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        """The number of that name."""
        return next(line.value for line in self.lines if line.name == name)


def plan_of(config_path: Path, overrides: Sequence[str]) -> Forecast:
    """The forecast for a config on this machine, with the doubts about the config. Raises ConfigError."""
    config = validated_config(config_path, overrides)
    try:
        rows = len(load_rows(config.data.train, config.data.split))
    except DataError:
        rows = None
    plan = forecast(config, read_shape(config.model), this_machine(), rows=rows)
    return replace(plan, warnings=(*doubts(config, config_path, overrides), *plan.warnings))


def forecast(config: Config, shape: ModelShape, machine: Machine, *, rows: int | None) -> Forecast:
    """Predict the numbers of a run; `rows` of the training data are None if unknown."""
    lines = (
        *_step(config),
        *_store(config),
        *_run(config, rows),
        *memory_lines(config, shape, machine),
        *disk_lines(config, shape),
    )
    plan = Forecast(lines=lines)
    return Forecast(
        lines=lines, warnings=(*_flow_warnings(config, plan), *_memory_warnings(config, plan, machine))
    )


def _step(config: Config) -> Iterator[Line]:
    batch, sampling, learner = config.batch, config.sampling, config.learner
    tokens = batch.sequences * sampling.max_tokens
    budget = learner.tokens_per_microbatch * learner.ranks
    part = "a step of the learner"
    yield count_line(part, "groups", batch.groups, "batch.groups")
    yield count_line(part, "sequences", batch.sequences, f"groups x batch.group_size ({batch.group_size})")
    longest = f"max_prompt_tokens + max_response_tokens = {sampling.max_tokens}"
    yield count_line(part, "tokens, at most", tokens, f"sequences x ({longest})")
    formed = f"batch.minibatches ({batch.minibatches}) x batch.epochs ({batch.epochs})"
    yield count_line(part, "optimizer steps", batch.minibatches * batch.epochs, formed)
    formed = (
        "of one optimizer step with full sequences: tokens / minibatches / (tokens_per_microbatch x ranks)"
    )
    yield count_line(part, "micro-batches per rank", math.ceil(tokens / batch.minibatches / budget), formed)


def _store(config: Config) -> Iterator[Line]:
    lag, groups, checkpoint = config.staleness.max_lag, config.batch.groups, config.checkpoint
    part = "staleness and store"
    opened = (lag + 1) * groups
    yield count_line(
        part, "open groups, at most", opened, f"(max_lag {lag} + 1) x groups: under way or waiting"
    )
    yield count_line(
        part, "window", config.window_groups, "window_groups, or 0.3 x open groups: who may be overtaken"
    )
    yield count_line(
        part, "oldest group, in steps", config.lag_bound, "max_lag + ceil((window - 1) / groups)"
    )
    at_once = config.generator.count * (
        config.generator.max_running // (config.batch.group_size + wants_greedy(config))
    )
    yield count_line(
        part, "groups being sampled", at_once, "generator.count x (max_running / group_size), at most"
    )
    frame = frame_bytes(config)
    yield bytes_line(part, "a group, at most", frame, "one of full length, encoded")
    kept = checkpoint.keep * checkpoint.every * groups
    formed = (
        f"(open groups + checkpoint.keep x every x groups = {opened + kept:,}) x a group: kept while a "
        "checkpoint needs them"
    )
    yield bytes_line(part, "store, at most", (opened + kept) * frame, formed)


def frame_bytes(config: Config) -> int:
    """Size of an encoded group whose prompts and responses have full length and two policy versions."""
    prompt, response = config.sampling.max_prompt_tokens, config.sampling.max_response_tokens
    rollout = Rollout(
        prompt_ids=np.zeros(prompt, np.int32),
        response_ids=np.zeros(response, np.int32),
        action_mask=np.ones(response, np.bool_),
        behaviour_logprobs=np.zeros(response, np.float32),
        version_spans=(VersionSpan(1, response - 1), VersionSpan(2, 1)),
        finish_reason="length",
        reward_parts={function.part: 0.0 for function in config.reward.functions},
        answer="0" * ANSWER_CHARACTERS,
    )
    group = Group(
        ticket_id=1, rollouts=(rollout,) * config.batch.group_size, generator_id="g0", finished_version=2
    )
    return len(encode_group(group, b"key"))


def _run(config: Config, rows: int | None) -> Iterator[Line]:
    steps, groups, part = config.learner.steps, config.batch.groups, "the run"
    yield count_line(part, "steps", steps, "learner.steps")
    yield count_line(
        part,
        "sequences in all",
        steps * config.batch.sequences,
        "steps x sequences, without what filters reject",
    )
    if rows is not None:
        yield count_line(part, "prompts", rows, f"rows of {config.data.train}")
        yield count_line(part, "steps per epoch", rows / groups, "prompts / groups")
        yield count_line(part, "epochs", steps * groups / rows, "steps x groups / prompts")
    if config.data.eval:
        rounds = math.ceil(steps / config.eval.every) + 1
        yield count_line(part, "evaluations", rounds, "steps / eval.every, and the first weights")


def _flow_warnings(config: Config, plan: Forecast) -> Iterator[str]:
    at_once, opened = plan["groups being sampled"], plan["open groups, at most"]
    if at_once > opened:
        yield (
            f"generators could sample {at_once:,.0f} groups at a time, but only {opened:,.0f} may be open: "
            "some will wait; raise staleness.max_lag or batch.groups, or lower generator.count or "
            "max_running"
        )


def _memory_warnings(config: Config, plan: Forecast, machine: Machine) -> Iterator[str]:
    held, cure = (
        plan["full sequences in KV"],
        "raise generator.kv_cache_gib (CPU) or gpu_memory_utilization (GPU)",
    )
    if held < 1:
        yield (
            f"the KV cache ({data_size(plan['KV cache'])}) holds no sequence of full length "
            f"({data_size(plan['KV of a sequence'])}): vLLM will refuse to start; {cure}, or lower "
            "sampling.max_response_tokens"
        )
    elif held < config.batch.group_size:
        yield (
            f"the KV cache holds {held:,.0f} sequences of full length, fewer than a group of "
            f"{config.batch.group_size}: long answers will be put off and computed again; {cure}"
        )
    if (share := plan["host memory"] / machine.memory_bytes) > TIGHT:
        yield (
            f"host memory: {data_size(plan['host memory'])} of {data_size(machine.memory_bytes)} available "
            f"({share:.0%}); lower generator.count, generator.kv_cache_gib or learner.tokens_per_microbatch"
        )
    for index, size_bytes in enumerate(machine.gpu_bytes if config.learner.device != "cpu" else ()):
        if (share := plan[f"GPU {index}"] / size_bytes) > TIGHT + 0.05:
            yield (
                f"GPU {index}: {data_size(plan[f'GPU {index}'])} of {data_size(size_bytes)} ({share:.0%}); "
                "lower gpu_memory_utilization or tokens_per_microbatch, set gradient_checkpointing, or let "
                "learner and generators use different GPUs"
            )
