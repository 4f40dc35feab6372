"""What fills each GPU of a run, and which settings would leave more of it free."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.config.schema import Config
from asyncrl.hosting.machine import Machine
from asyncrl.hosting.memory_use import (
    RECEIVER,
    SENDER,
    SLOTS,
    ModelShape,
    Part,
    generator_kv_bytes,
    receiver_bytes,
)
from asyncrl.hosting.placement import MARGIN, Placement
from asyncrl.telemetry.text import data_size

OTHERS = "other processes"
# Settings are named for parts that take at least this share of the GPU.
LARGE = 0.05


@dataclass(slots=True, kw_only=True)
class GpuUse:
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


def gpu_uses(
    config: Config,
    shape: ModelShape,
    rank: Sequence[Part],
    kv_bytes: int,
    machine: Machine,
    placement: Placement,
) -> list[GpuUse]:
    """Add up what each GPU of this machine must hold. `rank` are the parts of the first rank."""
    uses = [GpuUse(index=index, total_bytes=total) for index, total in enumerate(machine.gpu_bytes)]
    for number, seat in enumerate(placement.ranks):
        for use in (uses[index] for index in seat.gpus):
            use.has_rank = True
            # Only the first rank publishes.
            use.parts += [part for part in rank if not (number and part.name in (SLOTS, SENDER))]
            use.parts += [Part("to spare", int(MARGIN * use.total_bytes))] if seat.is_shared else []
            use.users.append(f"a rank and {MARGIN:.0%} to spare" if seat.is_shared else "a rank")
    for number, seat in enumerate(placement.generators):
        for use in (uses[index] for index in seat.gpus):
            allowed = int(seat.share * use.total_bytes)
            left = generator_kv_bytes(shape, config.model, config.generator, allowed_bytes=allowed)
            is_vllm = config.generator.engine == "vllm"
            more = max(0, kv_bytes - max(0, left)) if is_vllm else 0  # kv_cache_gib may ask for more
            use.parts += [
                Part("generators", allowed, cures=["lower generator.gpu_memory_utilization"]),
                Part("KV cache beyond their share", more, cures=["lower generator.kv_cache_gib"]),
            ]
            use.users.append(f"{seat.share:.0%} for a generator")
        if number == 0 and (receiver := receiver_bytes(config.weights)):
            uses[seat.gpus[0]].parts.append(Part(RECEIVER, receiver))
            uses[seat.gpus[0]].users.append(f"the {RECEIVER}")
    for name, seat in placement.scorers.items():
        for index in seat.gpus:
            size, cures = seat.share * uses[index].total_bytes, [f"give {name} a GPU of its own (`gpus`)"]
            uses[index].parts.append(Part("scorers", int(size), cures=cures))
            uses[index].users.append(f"{seat.share:.0%} for {name}")
    for use in uses:
        if others := machine.used_by_others(use.index):
            use.parts.append(Part(OTHERS, others))
            use.users.append(f"{data_size(others)} for other processes")
    return uses


def full_gpu(use: GpuUse) -> str:
    """Say how full a GPU would be, what fills it, and which settings help, the most helpful one first."""
    sizes = Counter[str]()
    for part in use.parts:
        sizes[part.name] += part.size_bytes
    large = {name: size for name, size in sizes.most_common() if size >= LARGE * use.total_bytes}
    filled = ", ".join(
        f"{name}{' (on this GPU only)' * (name == SLOTS)} {data_size(size)}" for name, size in large.items()
    )
    cures = [cure for name in large for part in use.parts if part.name == name for cure in part.cures]
    if OTHERS in large and use.size_bytes - large[OTHERS] <= use.total_bytes:
        other_gpus = "choose other GPUs with CUDA_VISIBLE_DEVICES"
        cures.insert(0, f"end the other processes (nvidia-smi lists them) or {other_gpus}")
    found = f"GPU {use.index}: {data_size(use.size_bytes)} of {data_size(use.total_bytes)} ({use.share:.0%})"
    advice = ", ".join(dict.fromkeys([*cures, "use more GPUs"]))
    return f"{found}: {filled}; {advice}, larger ones, or a smaller model"
