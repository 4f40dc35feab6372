"""What the processes of a run fill on this host, and which settings leave more of it free."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from asyncrl.config import registry
from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.config.schema import Config
from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.hosting import memory_use
from asyncrl.hosting.machine import Machine
from asyncrl.hosting.memory_use import ModelShape, Part, Rank
from asyncrl.hosting.placement import GENERATORS_SHARE, MARGIN, Placement
from asyncrl.telemetry.text import data_size

GIB = 1 << 30
# Private memory without the model: of a rank with its sender, and of a generator with its engine and rewards.
LEARNER_LIBRARIES_BYTES, GENERATOR_LIBRARIES_BYTES = int(0.8 * GIB), int(1.6 * GIB)
# Share of a memory above which a warning calls it tight, since the numbers are estimates.
TIGHT_HOST, TIGHT_GPU = 0.9, 0.95
KV_CURE = "raise generator.kv_cache_gib (CPU) or gpu_memory_utilization (GPU)"
OTHERS = "other processes"
# Settings are named for parts that take at least this share of the GPU.
LARGE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A number of the forecast, as shown and with its formula."""

    section: str
    name: str
    value: float
    shown: str
    formed: str

    @classmethod
    def count(cls, section: str, name: str, value: float, formed: str) -> Self:
        """Show a number of things, with one digit after the point if it is not whole."""
        shown = f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
        return cls(section=section, name=name, value=value, shown=shown, formed=formed)

    @classmethod
    def ratio(cls, section: str, name: str, value: float, formed: str) -> Self:
        """Show two digits."""
        return cls(section=section, name=name, value=value, shown=f"{value:.2g}", formed=formed)

    @classmethod
    def size(cls, section: str, name: str, value: int, formed: str) -> Self:
        """Show a number of bytes in a unit that fits it."""
        return cls(section=section, name=name, value=value, shown=data_size(value), formed=formed)


@dataclass(slots=True, kw_only=True)
class _GpuUse:
    """What the processes of a run, and others, need of one GPU."""

    index: int
    total_bytes: int
    has_rank: bool = False
    parts: list[Part] = field(default_factory=list)
    users: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """All that is needed."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def share(self) -> float:
        """What is needed, divided by what the GPU has."""
        return self.size_bytes / self.total_bytes

    def full(self) -> str:
        """Say how full the GPU would be, what fills it, and which settings help, the best one first."""
        sizes = Counter[str]()
        for part in self.parts:
            sizes[part.name] += part.size_bytes
        large = {name: size for name, size in sizes.most_common() if size >= LARGE * self.total_bytes}
        alone = {memory_use.SLOTS: " (on this GPU only)"}
        filled = ", ".join(f"{name}{alone.get(name, '')} {data_size(size)}" for name, size in large.items())
        cures = [cure for name in large for part in self.parts if part.name == name for cure in part.cures]
        if OTHERS in large and self.size_bytes - large[OTHERS] <= self.total_bytes:
            other_gpus = "choose other GPUs with CUDA_VISIBLE_DEVICES"
            cures.insert(0, f"end the other processes (nvidia-smi lists them) or {other_gpus}")
        found = f"{data_size(self.size_bytes)} of {data_size(self.total_bytes)} ({self.share:.0%})"
        advice = ", ".join(dict.fromkeys([*cures, "use more GPUs"]))
        return f"GPU {self.index}: {found}: {filled}; {advice}, larger ones, or a smaller model"


@dataclass(frozen=True)
class Memory:
    """What the processes of a run keep in memory and on the disk of this host."""

    config: Config
    shape: ModelShape
    reference: ModelShape
    machine: Machine
    placement: Placement
    # What the run's own store on this host may hold.
    store_bytes: int

    @cached_property
    def on_gpu(self) -> bool:
        return bool(self.machine.gpu_bytes) and self.config.learner.device != "cpu"

    def needs(self, column: str) -> bool:
        """Whether the algorithm's advantage reads a column."""
        return column in registry.needs("advantage", self.config.algorithm.advantage.name)

    @cached_property
    def has_reference(self) -> bool:
        return bool(self.config.algorithm.kl.coefficient) or self.needs("reference_logprobs_T")

    @cached_property
    def critic(self) -> OptimizerConfig | None:
        return self.config.critic.optimizer if self.needs("values_T") else None

    @cached_property
    def rank(self) -> list[Part]:
        """What fills the GPU of the first rank."""
        is_other = self.reference is not self.shape or not self.shape.adapter
        is_copy = self.has_reference and not self.config.teacher and is_other
        rank = Rank(self.shape, self.config.model, self.config.learner)
        parts = [*rank.parts(reference=self.reference if is_copy else None, critic=self.critic)]
        return [*parts, *rank.gpu_parts(self.config.weights)] if self.on_gpu else parts

    @cached_property
    def weights_bytes(self) -> int:
        return memory_use.weights_bytes(self.shape, self.config.model)

    @cached_property
    def request(self) -> int:
        """Sequences of a group, or of a prompt of a set."""
        samples = [self.config.of(one).eval.samples for one in self.config.data.sets.values()]
        return max(self.config.batch.group_size, *samples, 0)

    @cached_property
    def sequence_bytes(self) -> int:
        """KV cache of a sequence of full length."""
        return memory_use.sequence_kv_bytes(self.shape, self.config)

    @cached_property
    def kv_bytes(self) -> int:
        """KV cache of the generator that has least; transformers has that of one request at a time."""
        generator = self.config.generator
        if generator.engine == "transformers":
            return self.request * self.sequence_bytes
        if not self.on_gpu or generator.kv_cache_gib is not None:
            return int((generator.kv_cache_gib or memory_use.CPU_KV_CACHE_GIB) * GIB)
        elsewhere = generator.gpu_memory_utilization or GENERATORS_SHARE
        share = min((seat.share for seat in self.placement.generators), default=elsewhere)
        allowed = int(share * min(self.machine.gpu_bytes))
        model = self.config.model
        return max(0, memory_use.generator_kv_bytes(self.shape, model, generator, allowed_bytes=allowed))

    @cached_property
    def held(self) -> int:
        """Sequences of full length that the KV cache holds."""
        return self.kv_bytes // self.sequence_bytes

    @cached_property
    def rank_bytes(self) -> int:
        return sum(row.size_bytes for row in self.rank)

    @cached_property
    def host_bytes(self) -> int:
        config, shape, count = self.config, self.shape, len(self.placement.generators)
        host = config.ranks_per_host * LEARNER_LIBRARIES_BYTES + count * GENERATOR_LIBRARIES_BYTES
        host += 2 * memory_use.published_bytes(shape, config.model) + self.store_bytes
        host += memory_use.exported_bytes(shape, config.model)
        offloaded = memory_use.offloaded_bytes(shape, config.learner) * (2 if self.needs("values_T") else 1)
        host += offloaded // config.cluster.learner_hosts
        if not self.on_gpu:
            # Generators of this host read the published copies in place.
            host += config.ranks_per_host * self.rank_bytes + count * (self.weights_bytes + self.kv_bytes)
        return host

    @cached_property
    def uses(self) -> list[_GpuUse]:
        """What each GPU must hold; none if a run would use no GPU."""
        if not self.on_gpu:
            return []
        config, shape, model = self.config, self.shape, self.config.model
        uses = [_GpuUse(index=index, total_bytes=total) for index, total in enumerate(self.machine.gpu_bytes)]
        for number, seat in enumerate(self.placement.ranks):
            for use in (uses[index] for index in seat.gpus):
                use.has_rank = True
                # Only the first rank publishes.
                first_only = (memory_use.SLOTS, memory_use.SENDER) if number else ()
                use.parts += [part for part in self.rank if part.name not in first_only]
                use.parts += [Part("to spare", int(MARGIN * use.total_bytes))] if seat.is_shared else []
                use.users.append(f"a rank and {MARGIN:.0%} to spare" if seat.is_shared else "a rank")
        for number, seat in enumerate(self.placement.generators):
            for use in (uses[index] for index in seat.gpus):
                allowed = int(seat.share * use.total_bytes)
                left = memory_use.generator_kv_bytes(shape, model, config.generator, allowed_bytes=allowed)
                is_vllm = config.generator.engine == "vllm"
                more = max(0, self.kv_bytes - max(0, left)) if is_vllm else 0  # kv_cache_gib may ask for more
                use.parts += [
                    Part("generators", allowed, cures=["lower generator.gpu_memory_utilization"]),
                    Part("KV cache beyond their share", more, cures=["lower generator.kv_cache_gib"]),
                ]
                use.users.append(f"{seat.share:.0%} for a generator")
            if number == 0 and (receiver := memory_use.receiver_bytes(config.weights)):
                uses[seat.gpus[0]].parts.append(Part(memory_use.RECEIVER, receiver))
                uses[seat.gpus[0]].users.append(f"the {memory_use.RECEIVER}")
        for name, seat in self.placement.scorers.items():
            for index in seat.gpus:
                size, cures = seat.share * uses[index].total_bytes, [f"give {name} a GPU of its own (`gpus`)"]
                uses[index].parts.append(Part("scorers", int(size), cures=cures))
                uses[index].users.append(f"{seat.share:.0%} for {name}")
        for use in (one for one in uses if self.machine.used_by_others(one.index)):
            others_bytes = self.machine.used_by_others(use.index)
            use.parts.append(Part(OTHERS, others_bytes))
            use.users.append(f"{data_size(others_bytes)} for other processes")
        return uses

    def lines(self) -> Iterator[Line]:
        """Yield what the model, a rank, a generator and this host need."""
        config, shape = self.config, self.shape
        formed = "of the architecture in config.json, built without memory; tied ones once"
        yield Line.count("the model", "parameters", shape.parameters, formed)
        if shape.frozen:
            formed = "the vision part: it has weights only, in engines and in the learner"
            yield Line.count("the model", "frozen", shape.frozen, formed)
        size = memory_use.DTYPE_BYTES[config.model.dtype]
        in_4bit = f", but {shape.in_4bit:,} in 4 bits x {memory_use.BYTES_IN_4BIT:.3f}" * bool(shape.in_4bit)
        formed = f"parameters x {size} ({config.model.dtype}){in_4bit}"
        yield Line.size("the model", "weights", self.weights_bytes, formed)
        if config.model.lora is not None:
            formed = "model.lora: the parameters with a gradient, in the optimizer and in checkpoints"
            yield Line.count("the model", "adapter", shape.adapter, formed)
            formed = f"{config.model.update_target} x {size}, because of model.lora.sync"
            yield Line.size("the model", "an update", memory_use.published_bytes(shape, config.model), formed)
        for row in self.rank:
            yield Line.size("a rank of the learner", row.name, row.size_bytes, row.formed)
        yield Line.size("a rank of the learner", "one rank", self.rank_bytes, "all of these")
        yield from self.generator_lines()
        yield from self.host_lines()

    def generator_lines(self) -> Iterator[Line]:
        """Yield what a generator needs, without its libraries."""
        config, shape = self.config, self.shape
        part, parallel = "a generator", config.generator.tensor_parallel
        by = f" / {parallel} (tensor_parallel)" if parallel > 1 else ""
        yield Line.size(part, "generator weights", -(-self.weights_bytes // parallel), f"weights{by}")
        if config.generator.engine == "transformers":
            formed = f"the larger of batch.group_size and eval.samples ({self.request}) x KV of a "
            formed += "sequence: groups come one by one"
        elif config.generator.kv_cache_gib is not None or not self.on_gpu:
            formed = "generator.kv_cache_gib"
        else:
            formed = "its share of the GPU - weights - 2 GiB for CUDA and graphs - logits of max_running x 3"
        yield Line.size(part, "KV cache", self.kv_bytes, formed)
        token = memory_use.kv_bytes_per_token(shape, config.model)
        formed = f"2 x {shape.layers} layers x {shape.kv} x {memory_use.DTYPE_BYTES[config.model.dtype]}"
        formed += f" = {token:,} bytes a token{by}"
        yield Line.size(part, "KV of a sequence", self.sequence_bytes, formed)
        formed = f"KV cache / KV of a sequence; max_running is {config.generator.max_running}"
        yield Line.count(part, "full sequences in KV", self.held, formed)
        if self.on_gpu and (receiver := memory_use.receiver_bytes(config.weights)):
            formed = "nccl, beside one generator of a host: 1 GiB for CUDA + 0.4 GiB for NCCL + 2 buckets"
            yield Line.size(part, memory_use.RECEIVER, receiver, formed)

    def host_lines(self) -> Iterator[Line]:
        """Yield what all processes of this host need of its memory, its GPUs and its disk."""
        config, shape = self.config, self.shape
        ranks, count = config.ranks_per_host, len(self.placement.generators)
        formed = f"libraries ({ranks} x 0.8 + {count} x 1.6 GiB), two published versions, an export"
        formed += ", parameters x 20 of an offloaded optimizer" if config.learner.offload_optimizer else ""
        formed += ", the store" if self.store_bytes else ""
        formed += "" if self.on_gpu else ", ranks, generators"
        formed += f"; {data_size(self.machine.memory_bytes)} available"
        yield Line.size("this host", "host memory", self.host_bytes, formed)
        for index, use in enumerate(self.uses):
            formed = f"of {data_size(use.total_bytes)}: {', '.join(use.users) or 'used by nobody'}"
            yield Line.size("this host", f"GPU {index}", use.size_bytes, formed)
        kept = config.checkpoint.kept(config.learner.steps)
        one = checkpoint_bytes(shape, config.model, config.learner, critic=self.critic)
        formed = "weights, optimizer and export, with those of a critic"
        if self.has_reference and config.algorithm.kl.reference_decay < 1:
            one += self.weights_bytes
            formed += ", and a reference that moves"
        yield Line.size("this host", "checkpoint", one, formed)
        parts = " + ".join(f"{name} {count}" for name, count in kept.items() if count)
        formed = f"checkpoint x ({parts} + the one being written)"
        yield Line.size("this host", "disk", one * (sum(kept.values()) + 1), formed)

    def no_sequence(self) -> str:
        """Say that vLLM would not start."""
        return (
            f"the KV cache ({data_size(self.kv_bytes)}) holds no sequence of full length "
            f"({data_size(self.sequence_bytes)}): vLLM would refuse to start; {KV_CURE}, or lower "
            "sampling.max_response_tokens"
        )

    def misfits(self) -> Iterator[str]:
        """Say of what a GPU has too little."""
        if self.uses and (worst := max(self.uses, key=lambda use: use.share)).share > 1:
            yield worst.full()
        if self.uses and self.placement.generators and not self.held:
            yield self.no_sequence()

    def warnings(self) -> Iterator[str]:
        """Warn of a memory that is tight, and on a CPU of one that is too small."""
        cache = "generator.kv_cache_gib" if self.config.generator.engine == "vllm" else "batch.group_size"
        if not self.held and not self.uses:
            yield self.no_sequence()
        elif 1 <= self.held < self.config.batch.group_size:
            yield (
                f"the KV cache holds {self.held:,} sequences of full length, fewer than a group of "
                f"{self.config.batch.group_size}: vLLM will preempt and recompute long answers; {KV_CURE}"
            )
        if (share := self.host_bytes / self.machine.memory_bytes) > TIGHT_HOST:
            found = f"{data_size(self.host_bytes)} of {data_size(self.machine.memory_bytes)} available"
            yield (
                f"host memory: {found} ({share:.0%}); lower generator.count, {cache}, "
                "learner.tokens_per_microbatch or (the store) checkpoint.every"
            )
        of_learner = [use for use in self.uses if use.has_rank]
        if of_learner and TIGHT_GPU < (worst := max(of_learner, key=lambda use: use.share)).share <= 1:
            yield f"tight: {worst.full()}"


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
