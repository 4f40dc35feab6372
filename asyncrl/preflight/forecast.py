"""Predicts batches, staleness, store, memory and disk of a run, and warns of trouble."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.columns import EXPERTS, KEPT_COUNTS, KEPT_IDS, TEACHER
from asyncrl.config.resolved import wants_greedy
from asyncrl.config.schema import Config
from asyncrl.hosting.machine import Machine, routing_sizes
from asyncrl.hosting.memory_use import ModelShape
from asyncrl.hosting.placement import Placement, placement_of
from asyncrl.preflight.memory_forecast import Line, Memory
from asyncrl.rewards.forms import ANSWER_CHARACTERS
from asyncrl.types import Group, Rollout, Turns, VersionSpan
from asyncrl.wire.group_frames import encode_group

# The lines of runs with an environment.
LEAST_DUTY, LONGEST_EPISODE = "least duty of episodes", "longest episode, in steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The predicted numbers of a run, and warnings about them."""

    lines: tuple[Line, ...]
    warnings: tuple[str, ...] = ()
    # Those of the warnings with which the run cannot go well: a GPU is too small.
    misfits: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        """Return the number of that name."""
        return next(line.value for line in self.lines if line.name == name)


def forecast(
    config: Config,
    shape: ModelShape,
    machine: Machine,
    *,
    rows: Sequence[int] | None,
    teacher: ModelShape | None = None,
    placement: Placement | None = None,
) -> Forecast:
    """Predict the numbers of a run; `rows` of each source of data.train are None if unknown.

    `teacher`: shape of algorithm.reference, if any. `placement`: of this machine's processes, by default all.
    """
    placement = placement or placement_of(config, len(machine.gpu_bytes))
    store = [*_store(config, placement, max(map(frame_bytes, config.training)))]
    own_bytes = int(store[-1].value) if config.store.url is None else 0
    memory = Memory(config, shape, teacher or shape, machine, placement, own_bytes)
    plan = Forecast(lines=(*_step(config), *store, *_run(config, rows), *memory.lines()))
    misfits = tuple(memory.misfits())
    warnings = (*estimates(shape), *_flow_warnings(config, plan), *misfits, *memory.warnings())
    return replace(plan, warnings=warnings, misfits=misfits)


def estimates(shape: ModelShape) -> Iterator[str]:
    """Warn of a number that is less certain than the others, because of the model's architecture."""
    if shape.uncounted:
        yield (
            "the activations of this architecture are estimated, as those of Llama's layers, because torch "
            f"cannot count them without data ({shape.uncounted}): the learner may need much more; compare "
            "memory/allocated_bytes with memory/planned_bytes in the first steps, and lower "
            "learner.tokens_per_microbatch if it runs out of memory"
        )


def _per_episode(config: Config) -> int:
    return max(one.environment.sequences for one in config.training)


def _step(config: Config) -> Iterator[Line]:
    batch, sampling, learner = config.batch, config.sampling, config.learner
    per_episode = _per_episode(config)
    sequences = batch.sequences * per_episode
    tokens = sequences * sampling.max_tokens
    budget = learner.tokens_per_microbatch * learner.shares
    part = "a step of the learner"
    yield Line.count(part, "groups", batch.groups, "batch.groups")
    formed = f"groups x batch.group_size ({batch.group_size})"
    formed += f" x {per_episode} of an episode (environment.max_turns), at most" if per_episode > 1 else ""
    yield Line.count(part, "sequences", sequences, formed)
    longest = f"max_prompt_tokens + max_response_tokens = {sampling.max_tokens}"
    yield Line.count(part, "tokens, at most", tokens, f"sequences x ({longest})")
    formed = f"batch.minibatches ({batch.minibatches}) x batch.epochs ({batch.epochs})"
    yield Line.count(part, "optimizer steps", batch.minibatches * batch.epochs, formed)
    formed = "per optimizer step with full sequences: tokens / minibatches / (tokens_per_microbatch x ranks"
    formed += f" / sequence_parallel {learner.sequence_parallel})" if learner.sequence_parallel > 1 else ")"
    yield Line.count(part, "micro-batches per rank", math.ceil(tokens / batch.minibatches / budget), formed)


def _store(config: Config, placement: Placement, frame_bytes: int) -> Iterator[Line]:
    lag, groups, shards = config.staleness.max_lag, config.batch.groups, config.store.shards
    part, opened, saved = "staleness and store", config.open_groups, config.unsaved_steps
    formed = f"(max_lag {lag} + 1) x groups: under way or waiting"
    yield Line.count(part, "open groups, at most", opened, formed)
    formed = "window_groups, or 0.3 x open groups: those that may be overtaken"
    yield Line.count(part, "window", config.window_groups, formed)
    formed = f"max_lag + ceil((window - {shards}) / groups)"
    yield Line.count(part, "oldest group, in steps", config.lag_bound, formed)
    # A group that is larger than the engine is sampled alone.
    per_group = config.batch.group_size + wants_greedy(config)
    per_generator = max(1, config.generator.max_running // per_group)
    hosts = 1 if config.cluster.kind is None else config.cluster.generator_hosts
    count = len(placement.generators) or (config.generator.count or 1) * hosts
    formed = f"generators ({count}) x (max_running / group_size), at most"
    yield Line.count(part, "groups being sampled", count * per_generator, formed)
    if any(one.environment.is_used for one in config.training):
        formed = "groups being sampled / open groups: with less time in the model, engines wait for tickets"
        yield Line.ratio(part, LEAST_DUTY, count * per_generator / opened, formed)
        formed = f"(window - {shards}) / groups: until then other groups overtake the one that waits for it"
        yield Line.ratio(part, LONGEST_EPISODE, (config.window_groups - shards) / groups, formed)
    yield Line.size(part, "a group, at most", frame_bytes, "one of full length, encoded")
    held = opened + saved * groups
    formed = f"(open groups + {saved} steps that a checkpoint lacks x groups = {held:,}) x a group"
    yield Line.size(part, "store, at most", held * frame_bytes, formed)


def _run(config: Config, rows: Sequence[int] | None) -> Iterator[Line]:
    steps, groups, part = config.learner.steps, config.batch.groups, "the run"
    yield Line.count(part, "steps", steps, "learner.steps")
    formed = "steps x sequences, without what filters reject"
    yield Line.count(part, "sequences in all", steps * config.batch.sequences * _per_episode(config), formed)
    if rows is not None:
        named = ", ".join(one.path for one in config.data.train)
        yield Line.count(part, "prompts", sum(rows), f"rows of {named}")
    for source, share, size in zip(config.data.train, config.data.shares, rows or (), strict=False):
        of, factor = ("", "") if share == 1 else (f" of {source.label}", f" x {share}")
        prompts = "prompts" if share == 1 else f"{size:,} prompts"
        epoch = size / (groups * share)
        yield Line.count(part, f"steps per epoch{of}", float(epoch), f"{prompts} / (groups{factor})")
        yield Line.count(part, f"epochs{of}", float(steps / epoch), f"steps x groups{factor} / {prompts}")
    for name, one in config.data.sets.items():
        rounds, of = math.ceil(steps / config.of(one).eval.every) + 1, f" of {name}" if name else ""
        yield Line.count(part, f"evaluations{of}", rounds, "steps / eval.every, and the first weights")


def _flow_warnings(config: Config, plan: Forecast) -> Iterator[str]:
    sampled, opened, shards = plan["groups being sampled"], plan["open groups, at most"], config.store.shards
    if sampled > opened:
        yield (
            f"generators could sample {sampled:,.0f} groups at a time, but only {opened:,.0f} may be open: "
            "some wait; raise staleness.max_lag or batch.groups, or lower generator.count or max_running"
        )
    if any(one.environment.is_used for one in config.training) and plan[LONGEST_EPISODE] < 1:
        yield (
            f"the learner waits for an episode that lasts longer than {plan[LONGEST_EPISODE]:.2g} steps: for "
            f"episodes of k steps set staleness.window_groups to at least batch.groups x k + {shards}, and "
            "staleness.max_lag so that so many groups are open"
        )


def frame_bytes(config: Config) -> int:
    """Return the size of an encoded group with full prompts and responses of two policy versions."""
    prompt, response = config.sampling.max_prompt_tokens, config.sampling.max_response_tokens
    recorded: dict[str, NDArray[Any]] = {TEACHER: np.zeros(response, np.float32)} if config.teacher else {}
    if sizes := routing_sizes(config.model):
        recorded[EXPERTS] = np.zeros((prompt + response, sizes["layers"], sizes["top_k"]), np.int16)
    if (most := config.sampling.top_k) > 0:
        recorded[KEPT_COUNTS] = np.full(response, most, np.int32)
        recorded[KEPT_IDS] = np.zeros(response * most, np.int32)
    turns = None
    if config.environment.is_used:
        count = min(config.environment.max_turns, response)
        rewards, states = np.zeros(count, np.float32), np.zeros(count, np.uint64)
        turns = Turns(ends=np.arange(1, count + 1, dtype=np.int32), rewards=rewards, states=states)
    rollout = Rollout(
        prompt_ids=np.zeros(prompt, np.int32),
        response_ids=np.zeros(response, np.int32),
        action_mask=np.ones(response, np.bool_),
        behaviour_logprobs=np.zeros(response, np.float32),
        version_spans=(VersionSpan(1, response - 1), VersionSpan(2, 1)),
        finish_reason="length",
        reward_parts=dict.fromkeys(config.reward_parts, 0.0),
        answer="0" * ANSWER_CHARACTERS,
        turns=turns,
        recorded=recorded,
    )
    rollouts = (rollout,) * (config.batch.group_size * config.environment.sequences)
    said = config.batch.group_size * config.reward.judgement_bytes
    group = Group(
        ticket_id=1,
        rollouts=rollouts,
        generator_id="g0",
        finished_version=2,
        recorded={"judgements": np.zeros(said, np.uint8)} if said else {},
    )
    return len(encode_group(group, b"key"))
