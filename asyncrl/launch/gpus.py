"""The NVIDIA GPUs of this machine that this process and its children may use."""

import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def count_gpus() -> int:
    """Count the NVIDIA GPUs that this process may use, without loading CUDA."""
    names = visible_names(os.environ.get(VARIABLE))
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) if names is None else len(names)


def visible_names(variable: str | None) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, as CUDA reads it; None if it is not set.

    The list ends at the first name that no GPU can have, such as -1. With a name that occurs twice CUDA shows
    none.
    """
    if variable is None:
        return None
    names = list(takewhile(_may_name_a_gpu, (name.strip() for name in variable.split(","))))
    return names if len(set(names)) == len(names) else []


def _may_name_a_gpu(name: str) -> bool:
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


def visible_devices(gpus: Sequence[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a child that gets these of our GPUs, by the names that ours have."""
    names = visible_names(os.environ.get(VARIABLE))
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpus)


def driver_is_replaced() -> bool:
    """Return whether CUDA's compatibility package takes the place of the driver's own part of CUDA."""
    return "compat" in os.environ.get("LD_LIBRARY_PATH", "")
