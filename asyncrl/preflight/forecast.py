"""Predicts batches, staleness, store, memory and disk of a run, and warns of trouble."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from asyncrl.config import registry
from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.config.resolved import wants_greedy
from asyncrl.config.schema import Config
from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.hosting import memory_use
from asyncrl.hosting.machine import Machine
from asyncrl.hosting.memory_use import ModelShape, Part, Rank
from asyncrl.hosting.placement import GENERATORS_SHARE, Placement, placement_of
from asyncrl.preflight.frame_size import frame_bytes
from asyncrl.preflight.gpu_use import GpuUse, full_gpu, gpu_uses
from asyncrl.telemetry.text import data_size

GIB = 1 << 30
# Private memory without the model: of a rank with its sender, and of a generator with its engine and rewards.
LEARNER_LIBRARIES_BYTES, GENERATOR_LIBRARIES_BYTES = int(0.8 * GIB), int(1.6 * GIB)
# Share of a memory above which a warning calls it tight, since the numbers are estimates.
TIGHT_HOST, TIGHT_GPU = 0.9, 0.95
# The lines of runs with an environment.
LEAST_DUTY, LONGEST_EPISODE = "least duty of episodes", "longest episode, in steps"
KV_CURE = "raise generator.kv_cache_gib (CPU) or gpu_memory_utilization (GPU)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A number of the forecast, as shown and with its formula."""

    section: str
    name: str
    value: float
    shown: str
    formed: str


def _count(section: str, name: str, value: float, formed: str) -> Line:
    shown = f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return Line(section=section, name=name, value=value, shown=shown, formed=formed)


def _ratio(section: str, name: str, value: float, formed: str) -> Line:
    return Line(section=section, name=name, value=value, shown=f"{value:.2g}", formed=formed)


def _size(section: str, name: str, value: int, formed: str) -> Line:
    return Line(section=section, name=name, value=value, shown=data_size(value), formed=formed)


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
    lines = (*_step(config), *_store(config, placement), *_run(config, rows))
    on_gpu, kv_bytes = _on_gpu(config, machine), _kv_bytes(config, shape, machine, placement)
    rank = _parts(config, shape, teacher or shape, on_gpu=on_gpu)
    uses = gpu_uses(config, shape, rank, kv_bytes, machine, placement) if on_gpu else []
    memory = _memory(config, shape, rank, kv_bytes, uses, machine, placement)
    plan = Forecast(lines=(*lines, *memory, *_disk(config, shape)))
    misfits = tuple(_misfits(plan, uses, placement))
    warnings = (*_flow_warnings(config, plan), *misfits, *_memory_warnings(config, plan, uses, machine))
    return replace(plan, warnings=(*estimates(shape), *warnings), misfits=misfits)


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
    yield _count(part, "groups", batch.groups, "batch.groups")
    formed = f"groups x batch.group_size ({batch.group_size})"
    formed += f" x {per_episode} of an episode (environment.max_turns), at most" if per_episode > 1 else ""
    yield _count(part, "sequences", sequences, formed)
    longest = f"max_prompt_tokens + max_response_tokens = {sampling.max_tokens}"
    yield _count(part, "tokens, at most", tokens, f"sequences x ({longest})")
    formed = f"batch.minibatches ({batch.minibatches}) x batch.epochs ({batch.epochs})"
    yield _count(part, "optimizer steps", batch.minibatches * batch.epochs, formed)
    formed = "per optimizer step with full sequences: tokens / minibatches / (tokens_per_microbatch x ranks"
    formed += f" / sequence_parallel {learner.sequence_parallel})" if learner.sequence_parallel > 1 else ")"
    yield _count(part, "micro-batches per rank", math.ceil(tokens / batch.minibatches / budget), formed)


def _held_groups(config: Config) -> int:
    return config.open_groups + config.unsaved_steps * config.batch.groups


def _store(config: Config, placement: Placement) -> Iterator[Line]:
    lag, groups, shards = config.staleness.max_lag, config.batch.groups, config.store.shards
    part, opened, saved = "staleness and store", config.open_groups, config.unsaved_steps
    formed = f"(max_lag {lag} + 1) x groups: under way or waiting"
    yield _count(part, "open groups, at most", opened, formed)
    formed = "window_groups, or 0.3 x open groups: those that may be overtaken"
    yield _count(part, "window", config.window_groups, formed)
    formed = f"max_lag + ceil((window - {shards}) / groups)"
    yield _count(part, "oldest group, in steps", config.lag_bound, formed)
    # A group that is larger than the engine is sampled alone.
    per_group = config.batch.group_size + wants_greedy(config)
    per_generator = max(1, config.generator.max_running // per_group)
    hosts = 1 if config.cluster.kind is None else config.cluster.generator_hosts
    count = len(placement.generators) or (config.generator.count or 1) * hosts
    formed = f"generators ({count}) x (max_running / group_size), at most"
    yield _count(part, "groups being sampled", count * per_generator, formed)
    if any(one.environment.is_used for one in config.training):
        formed = "groups being sampled / open groups: with less time in the model, engines wait for tickets"
        yield _ratio(part, LEAST_DUTY, count * per_generator / opened, formed)
        formed = f"(window - {shards}) / groups: until then other groups overtake the one that waits for it"
        yield _ratio(part, LONGEST_EPISODE, (config.window_groups - shards) / groups, formed)
    frame = max(map(frame_bytes, config.training))
    yield _size(part, "a group, at most", frame, "one of full length, encoded")
    held = _held_groups(config)
    formed = f"(open groups + {saved} steps that a checkpoint lacks x groups = {held:,}) x a group"
    yield _size(part, "store, at most", held * frame, formed)


def _run(config: Config, rows: Sequence[int] | None) -> Iterator[Line]:
    steps, groups, part = config.learner.steps, config.batch.groups, "the run"
    yield _count(part, "steps", steps, "learner.steps")
    formed = "steps x sequences, without what filters reject"
    yield _count(part, "sequences in all", steps * config.batch.sequences * _per_episode(config), formed)
    if rows is not None:
        named = ", ".join(one.path for one in config.data.train)
        yield _count(part, "prompts", sum(rows), f"rows of {named}")
    for source, share, size in zip(config.data.train, config.data.shares, rows or (), strict=False):
        of, factor = ("", "") if share == 1 else (f" of {source.label}", f" x {share}")
        prompts = "prompts" if share == 1 else f"{size:,} prompts"
        epoch = size / (groups * share)
        yield _count(part, f"steps per epoch{of}", float(epoch), f"{prompts} / (groups{factor})")
        yield _count(part, f"epochs{of}", float(steps / epoch), f"steps x groups{factor} / {prompts}")
    for name, one in config.data.sets.items():
        rounds, of = math.ceil(steps / config.of(one).eval.every) + 1, f" of {name}" if name else ""
        yield _count(part, f"evaluations{of}", rounds, "steps / eval.every, and the first weights")


def _memory(
    config: Config,
    shape: ModelShape,
    rank: Sequence[Part],
    kv_bytes: int,
    uses: Sequence[GpuUse],
    machine: Machine,
    placement: Placement,
) -> Iterator[Line]:
    formed = "of the architecture in config.json, built without memory; tied ones once"
    yield _count("the model", "parameters", shape.parameters, formed)
    if shape.frozen:
        formed = "the vision part: it has weights only, in engines and in the learner"
        yield _count("the model", "frozen", shape.frozen, formed)
    dtype, weights = config.model.dtype, memory_use.weights_bytes(shape, config.model)
    formed = f"parameters x {memory_use.DTYPE_BYTES[dtype]} ({dtype})"
    formed += f", but {shape.in_4bit:,} in 4 bits x {memory_use.BYTES_IN_4BIT:.3f}" if shape.in_4bit else ""
    yield _size("the model", "weights", weights, formed)
    if config.model.lora is not None:
        formed = "model.lora: the parameters with a gradient, in the optimizer and in checkpoints"
        yield _count("the model", "adapter", shape.adapter, formed)
        formed = f"{config.model.update_target} x {memory_use.DTYPE_BYTES[dtype]}, because of model.lora.sync"
        yield _size("the model", "an update", memory_use.published_bytes(shape, config.model), formed)
    on_gpu = _on_gpu(config, machine)
    for row in rank:
        yield _size("a rank of the learner", row.name, row.size_bytes, row.formed)
    rank_bytes = sum(row.size_bytes for row in rank)
    yield _size("a rank of the learner", "one rank", rank_bytes, "all of these")
    yield from _generator_lines(config, shape, kv_bytes, on_gpu=on_gpu)
    yield from _host_lines(config, shape, rank_bytes, kv_bytes, machine, placement)
    for index, use in enumerate(uses):
        formed = f"of {data_size(machine.gpu_bytes[index])}: {', '.join(use.users) or 'used by nobody'}"
        yield _size("this host", f"GPU {index}", use.size_bytes, formed)


def checkpoint_bytes(
    shape: ModelShape, model: ModelConfig, learner: LearnerConfig, *, critic: OptimizerConfig | None
) -> int:
    """Bytes on disk: weights or adapter, master copy, moments, export.

    With ZeRO, DeepSpeed writes a master copy in float32, too, and in stage 3 nothing else of the weights.
    """
    stage = memory_use.zero_stage(learner.zero_stage, model.dtype)
    each = memory_use.FP32 * (stage > 0) + memory_use.DTYPE_BYTES[model.dtype] * (stage < 3)
    models = [(shape, learner.optimizer)]
    if critic:
        models.append((shape.without_output_layer(), critic))
    kept = sum(one.trained * each + memory_use.moments_bytes(one, optimizer) for one, optimizer in models)
    return kept + memory_use.exported_bytes(shape, model)


def _disk(config: Config, shape: ModelShape) -> Iterator[Line]:
    kept = config.checkpoint.kept(config.learner.steps)
    one = checkpoint_bytes(shape, config.model, config.learner, critic=_critic(config))
    formed = "weights, optimizer and export, with those of a critic"
    if _has_reference(config) and config.algorithm.kl.reference_decay < 1:
        one += memory_use.weights_bytes(shape, config.model)
        formed += ", and a reference that moves"
    yield _size("this host", "checkpoint", one, formed)
    parts = " + ".join(f"{name} {count}" for name, count in kept.items() if count)
    formed = f"checkpoint x ({parts} + the one being written)"
    yield _size("this host", "disk", one * (sum(kept.values()) + 1), formed)


def _on_gpu(config: Config, machine: Machine) -> bool:
    return bool(machine.gpu_bytes) and config.learner.device != "cpu"


def _needs(config: Config, column: str) -> bool:
    return column in registry.needs("advantage", config.algorithm.advantage.name)


def _has_reference(config: Config) -> bool:
    return bool(config.algorithm.kl.coefficient) or _needs(config, "reference_logprobs_T")


def _critic(config: Config) -> OptimizerConfig | None:
    return config.critic.optimizer if _needs(config, "values_T") else None


def _largest_request(config: Config) -> int:
    """Return the sequences of a group, or of a prompt of a set."""
    return max([config.batch.group_size, *(config.of(one).eval.samples for one in config.data.sets.values())])


def _kv_bytes(config: Config, shape: ModelShape, machine: Machine, placement: Placement) -> int:
    """Return the KV cache of the generator that has least; transformers has that of one request at a time."""
    generator = config.generator
    if generator.engine == "transformers":
        return _largest_request(config) * memory_use.sequence_kv_bytes(shape, config)
    if not _on_gpu(config, machine) or generator.kv_cache_gib is not None:
        return int((generator.kv_cache_gib or memory_use.CPU_KV_CACHE_GIB) * GIB)
    elsewhere = generator.gpu_memory_utilization or GENERATORS_SHARE
    share = min((seat.share for seat in placement.generators), default=elsewhere)
    allowed_bytes = int(share * min(machine.gpu_bytes))
    return max(0, memory_use.generator_kv_bytes(shape, config.model, generator, allowed_bytes=allowed_bytes))


def _parts(config: Config, shape: ModelShape, reference: ModelShape, *, on_gpu: bool) -> list[Part]:
    """Return what fills the GPU of the first rank."""
    is_copy = _has_reference(config) and not config.teacher and (reference is not shape or not shape.adapter)
    rank = Rank(shape, config.model, config.learner)
    parts = [*rank.parts(reference=reference if is_copy else None, critic=_critic(config))]
    return [*parts, *rank.gpu_parts(config.weights)] if on_gpu else parts


def _generator_lines(config: Config, shape: ModelShape, kv_bytes: int, *, on_gpu: bool) -> Iterator[Line]:
    part, parallel = "a generator", config.generator.tensor_parallel
    by = f" / {parallel} (tensor_parallel)" if parallel > 1 else ""
    weights = memory_use.weights_bytes(shape, config.model)
    token = memory_use.kv_bytes_per_token(shape, config.model)
    sequence = memory_use.sequence_kv_bytes(shape, config)
    yield _size(part, "generator weights", -(-weights // parallel), f"weights{by}")
    if config.generator.engine == "transformers":
        formed = f"the larger of batch.group_size and eval.samples ({_largest_request(config)}) x KV of a "
        formed += "sequence: groups come one by one"
    elif config.generator.kv_cache_gib is not None or not on_gpu:
        formed = "generator.kv_cache_gib"
    else:
        formed = "its share of the GPU - weights - 2 GiB for CUDA and graphs - logits of max_running x 3"
    yield _size(part, "KV cache", kv_bytes, formed)
    factors = f"2 x {shape.layers} layers x {shape.kv} x {memory_use.DTYPE_BYTES[config.model.dtype]}"
    yield _size(part, "KV of a sequence", sequence, f"{factors} = {token:,} bytes a token{by}")
    formed = f"KV cache / KV of a sequence; max_running is {config.generator.max_running}"
    yield _count(part, "full sequences in KV", kv_bytes // sequence, formed)
    if on_gpu and (receiver := memory_use.receiver_bytes(config.weights)):
        formed = "nccl, beside one generator of a host: 1 GiB for CUDA + 0.4 GiB for NCCL + 2 buckets"
        yield _size(part, memory_use.RECEIVER, receiver, formed)


def _host_lines(
    config: Config, shape: ModelShape, rank: int, kv_bytes: int, machine: Machine, placement: Placement
) -> Iterator[Line]:
    ranks, count = config.ranks_per_host, len(placement.generators)
    weights = memory_use.weights_bytes(shape, config.model)
    host = ranks * LEARNER_LIBRARIES_BYTES + count * GENERATOR_LIBRARIES_BYTES
    host += 2 * memory_use.published_bytes(shape, config.model)
    host += memory_use.exported_bytes(shape, config.model)
    offloaded = memory_use.offloaded_bytes(shape, config.learner) * (2 if _needs(config, "values_T") else 1)
    host += offloaded // config.cluster.learner_hosts
    formed = f"libraries ({ranks} x 0.8 + {count} x 1.6 GiB), two published versions, an export"
    formed += ", parameters x 20 of an offloaded optimizer" if config.learner.offload_optimizer else ""
    if config.store.url is None:
        host += _held_groups(config) * max(map(frame_bytes, config.training))
        formed += ", the store"
    if not _on_gpu(config, machine):
        # Generators of this host read the published copies in place.
        host += ranks * rank + count * (weights + kv_bytes)
        formed += ", ranks, generators"
    formed += f"; {data_size(machine.memory_bytes)} available"
    yield _size("this host", "host memory", host, formed)


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


def _misfits(plan: Forecast, uses: Sequence[GpuUse], placement: Placement) -> Iterator[str]:
    if uses and (worst := max(uses, key=lambda use: use.share)).share > 1:
        yield full_gpu(worst)
    if uses and placement.generators and plan["full sequences in KV"] < 1:
        yield _no_sequence(plan)


def _no_sequence(plan: Forecast) -> str:
    return (
        f"the KV cache ({data_size(plan['KV cache'])}) holds no sequence of full length "
        f"({data_size(plan['KV of a sequence'])}): vLLM would refuse to start; {KV_CURE}, or lower "
        "sampling.max_response_tokens"
    )


def _memory_warnings(
    config: Config, plan: Forecast, uses: Sequence[GpuUse], machine: Machine
) -> Iterator[str]:
    held = plan["full sequences in KV"]
    cache = "generator.kv_cache_gib" if config.generator.engine == "vllm" else "batch.group_size"
    if held < 1 and not uses:
        yield _no_sequence(plan)
    elif 1 <= held < config.batch.group_size:
        yield (
            f"the KV cache holds {held:,.0f} sequences of full length, fewer than a group of "
            f"{config.batch.group_size}: vLLM will preempt and recompute long answers; {KV_CURE}"
        )
    if (share := plan["host memory"] / machine.memory_bytes) > TIGHT_HOST:
        yield (
            f"host memory: {data_size(plan['host memory'])} of {data_size(machine.memory_bytes)} available "
            f"({share:.0%}); lower generator.count, {cache}, learner.tokens_per_microbatch or (the store) "
            "checkpoint.every"
        )
    of_learner = [use for use in uses if use.has_rank]
    if of_learner and TIGHT_GPU < (worst := max(of_learner, key=lambda use: use.share)).share <= 1:
        yield f"tight: {full_gpu(worst)}"
