"""The NVIDIA GPUs of this machine that this process and its children may use."""

import os
from collections.abc import Sequence
from pathlib import Path


def count_gpus() -> int:
    """Count the NVIDIA GPUs that this process may use, without loading CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def visible_devices(gpus: Sequence[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a child that gets these of our GPUs, by the names that ours have."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in ours.split(",") if name.strip()] if ours is not None else None
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpus)
