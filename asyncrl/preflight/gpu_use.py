"""What fills each GPU of a run, and which settings would leave more of it free."""

from dataclasses import dataclass, field

from asyncrl.config.schema import Config
from asyncrl.hosting.machine import Machine
from asyncrl.hosting.memory_use import (
    SLOTS,
    ModelShape,
    generator_kv_bytes,
    receiver_bytes,
    zero_stage,
)
from asyncrl.hosting.placement import MARGIN, Placement
from asyncrl.telemetry.text import data_size

# The processes of `weights.transport: nccl`.
SENDER, RECEIVER = "process that sends", "process that receives"
# Parts of a GPU that are not parts of a rank.
SPARE, GENERATORS, MORE_CACHE, OTHERS = (
    "to spare",
    "generators",
    "KV cache beyond their share",
    "other processes",
)
# Settings are named for parts that take at least this share of the GPU.
LARGE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What the processes of a run, and others, need of one GPU."""

    index: int
    total_bytes: int
    has_rank: bool
    parts: dict[str, int] = field(default_factory=dict)
    users: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """All that is needed."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """What is needed, divided by what the GPU has."""
        return self.size_bytes / self.total_bytes

    def add(self, part: str, size_bytes: int) -> None:
        """Add to the part of that name."""
        self.parts[part] = self.parts.get(part, 0) + size_bytes


def gpu_uses(
    config: Config,
    shape: ModelShape,
    rank: dict[str, int],
    kv_bytes: int,
    machine: Machine,
    placement: Placement,
) -> list[GpuUse]:
    """Add up what each GPU of this machine must hold. `rank` are the parts of the first rank."""
    return [
        _use(config, shape, rank, kv_bytes, machine, placement, index)
        for index in range(len(machine.gpu_bytes))
    ]


def _use(
    config: Config,
    shape: ModelShape,
    rank: dict[str, int],
    kv_bytes: int,
    machine: Machine,
    placement: Placement,
    index: int,
) -> GpuUse:
    total = machine.gpu_bytes[index]
    use = GpuUse(index=index, total_bytes=total, has_rank=index in placement.learner_gpus)
    for number, seat in enumerate(placement.ranks):
        if index in seat.gpus:
            for part, size_bytes in rank.items():
                if number == 0 or part not in (SLOTS, SENDER):
                    use.add(part, size_bytes)
            if seat.is_shared:
                use.add(SPARE, int(MARGIN * total))
            use.users.append(f"a rank and {MARGIN:.0%} to spare" if seat.is_shared else "a rank")
    for number, seat in enumerate(placement.generators):
        if index in seat.gpus:
            allowed = int(seat.share * total)
            left = generator_kv_bytes(shape, config.model, config.generator, allowed_bytes=allowed)
            use.add(GENERATORS, allowed)
            use.add(MORE_CACHE, max(0, kv_bytes - max(0, left)))  # kv_cache_gib may ask for more
            use.users.append(f"{seat.share:.0%} for a generator")
        if number == 0 and index == seat.gpus[0] and (receiver := receiver_bytes(config.weights)):
            use.add(RECEIVER, receiver)
            use.users.append(f"the {RECEIVER}")
    if others := machine.used_by_others(index):
        use.add(OTHERS, others)
        use.users.append(f"{data_size(others)} for other processes")
    return use


def full_gpu(config: Config, use: GpuUse) -> str:
    """Say how full a GPU would be, what fills it, and which settings help, the most helpful one first."""
    parts = sorted(use.parts.items(), key=lambda part: -part[1])
    large = {name: size_bytes for name, size_bytes in parts if size_bytes >= LARGE * use.total_bytes}
    filled = ", ".join(f"{_named(name)} {data_size(size_bytes)}" for name, size_bytes in large.items())
    known = _cures(config)
    cures = [cure for name in large for cure in known.get(name, [])]
    if OTHERS in large and use.size_bytes - use.parts[OTHERS] <= use.total_bytes:
        other_gpus = "choose other GPUs with CUDA_VISIBLE_DEVICES"
        cures.insert(0, f"end the other processes (nvidia-smi lists them) or {other_gpus}")
    found = f"GPU {use.index}: {data_size(use.size_bytes)} of {data_size(use.total_bytes)} ({use.share:.0%})"
    advice = ", ".join(dict.fromkeys([*cures, "use more GPUs"]))
    return f"{found}: {filled}; {advice}, larger ones, or a smaller model"


def _named(part: str) -> str:
    return f"{part} (on this GPU only)" if part == SLOTS else part


def _cures(config: Config) -> dict[str, list[str]]:
    """Return the settings that make each part smaller."""
    learner, stage = config.learner, zero_stage(config.learner.zero_stage, config.model.dtype)

    def sharded(from_stage: int) -> list[str]:
        return ["raise learner.zero_stage"] if learner.ranks > 1 and stage < from_stage else []

    offload = "set learner.offload_optimizer: true" + (" with learner.zero_stage: 3" if stage < 3 else "")
    offloaded = [] if learner.offload_optimizer else [offload]
    recomputed = ["set learner.gradient_checkpointing: true"]
    if learner.gradient_checkpointing is True:
        recomputed = ["raise learner.sequence_parallel"] if learner.sequence_parallel < learner.ranks else []
    return {
        "activations": [*recomputed, "lower learner.tokens_per_microbatch"],
        "learner weights": sharded(3),
        "gradients": [*sharded(2), *offloaded],
        "optimizer": [*sharded(1), *offloaded],
        "reference": sharded(3),
        "critic": [*sharded(3), *offloaded],
        SLOTS: [] if config.weights.transport == "nccl" else ["set weights.slots: host"],
        GENERATORS: ["lower generator.gpu_memory_utilization"],
        MORE_CACHE: ["lower generator.kv_cache_gib"],
    }
