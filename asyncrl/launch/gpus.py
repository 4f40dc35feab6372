"""Which GPUs which process of a machine gets: learner ranks first, then generators; with too few, they
share."""

import os
from collections.abc import Sequence
from pathlib import Path


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use; without loading CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def visible_devices(gpus: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for a child that gets these of ours: their names, not their places among them."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in ours.split(",") if name.strip()] if ours is not None else None
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpus)


def learner_gpus(gpus: int, ranks: int) -> list[int]:
    """One for each rank; all ranks on the only one there is."""
    return list(range(min(ranks, gpus)))


def generator_gpus(gpus: int, index: int, *, ranks: int, width: int) -> list[int]:
    """The `width` GPUs of generator `index`: those after the learner's, dealt again from there when they run
    out."""
    free = list(range(ranks, gpus)) if gpus > ranks else list(range(gpus))
    if not free:
        return []
    start = index * width
    return [free[(start + offset) % len(free)] for offset in range(min(width, len(free)))]
