"""The NVIDIA GPUs of this machine that this process and its children may use."""

import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Literal

from asyncrl.config.schema import Config
from asyncrl.hosting.smi import list_uuids

VARIABLE, ORDER_VARIABLE = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
UUID_LENGTH = len("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
INSTANCE = "MIG-"  # how the UUID of an instance begins
# The order of nvidia-smi, by which a run is planned. By default CUDA puts the fastest GPU first.
BY_BUS = {ORDER_VARIABLE: "PCI_BUS_ID"}
DEVICES = Path("/dev")
# Where the linker finds CUDA's compatibility package, if a container's tools have put it there.
LINKER_PATHS = Path("/etc/ld.so.conf.d")


def count_gpus() -> int:
    """Count the NVIDIA GPUs that this process may use, without loading CUDA."""
    names = visible_names()
    if names is not None:
        return len(names)
    # WSL2 and some containers have no device files.
    return len(list(DEVICES.glob("nvidia[0-9]*"))) or len(list_uuids())


def has_instances() -> bool:
    """Return whether this process may use instances of MIG. CUDA shows a process only one of them."""
    return any(name.startswith(INSTANCE) for name in visible_names() or ())


def count_together() -> int:
    """Count the GPUs that one process can use at the same time."""
    return min(count_gpus(), 1) if has_instances() else count_gpus()


def is_elsewhere(kind: str | None) -> bool:
    """Return whether the GPUs of a run with this `cluster.kind` are those of other machines."""
    # A shell of `salloc` may be on a host that is not a node of its job.
    return kind == "ray" or (kind == "slurm" and "SLURMD_NODENAME" not in os.environ)


def visible_names() -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, as CUDA reads it; None if it is not set.

    The list ends at the first name that no GPU can have, such as -1. With a name given twice CUDA shows none.
    """
    if (variable := os.environ.get(VARIABLE)) is None:
        return None
    given = (name.strip() for name in variable.split(","))
    names = list(takewhile(lambda name: name.isdecimal() or name.startswith(("GPU-", INSTANCE)), given))
    return names if len(set(names)) == len(names) else []


def visible_devices(gpus: Sequence[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a child that gets these of our GPUs, by the names that ours have."""
    names = visible_names()
    return ",".join(_whole(names[gpu]) if names else str(gpu) for gpu in gpus)


def _whole(name: str) -> str:
    """A UUID in full. CUDA takes its beginning, but NVML, which vLLM asks, does not."""
    short = name.startswith("GPU-") and len(name) < UUID_LENGTH
    return next((uuid for uuid in list_uuids() if uuid.startswith(name)), name) if short else name


def order_by_bus() -> None:
    """Let CUDA number the GPUs of this process and its children as nvidia-smi does, unless the user chose."""
    os.environ.setdefault(ORDER_VARIABLE, BY_BUS[ORDER_VARIABLE])


def other_order() -> str | None:
    """Return the order that the user chose for CUDA, if an index may then mean another GPU to nvidia-smi."""
    order = os.environ.get(ORDER_VARIABLE)
    names = visible_names()
    by_index = names is None or any(name.isdecimal() for name in names)
    return order if order and order != BY_BUS[ORDER_VARIABLE] and by_index else None


def driver_is_replaced() -> bool:
    """Return whether CUDA's compatibility package takes the place of the driver's own part of CUDA."""
    paths = [file.read_text(errors="replace") for file in LINKER_PATHS.glob("*.conf")]
    return "compat" in os.environ.get("LD_LIBRARY_PATH", "") or any(
        "cuda" in line and "compat" in line for text in paths for line in text.splitlines()
    )


def resolve_device(config: Config) -> Literal["cuda", "cpu"]:
    """Return cuda if there is a GPU that torch is built for, unless the config keeps the learner on the CPU.

    CUDA itself is not asked: vLLM's own processes are to be the first that use it.
    """
    import torch

    has_gpu = count_gpus() > 0 and torch.version.cuda is not None
    return "cuda" if has_gpu and config.learner.device != "cpu" else "cpu"
