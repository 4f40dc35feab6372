"""Checks of GPUs: their driver, faults, and other processes on them."""

import re
import subprocess
from collections.abc import Iterator, Sequence

from packaging.version import InvalidVersion, Version

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, DataError
from asyncrl.hosting.gpus import ORDER_VARIABLE, count_gpus, driver_is_replaced, other_order
from asyncrl.hosting.nvidia import Gpu, short_bus, visible_gpus
from asyncrl.hosting.smi import ask, is_installed
from asyncrl.preflight.checks.base import Finding, doubtful, fine, wrong
from asyncrl.telemetry.text import data_size

# The first driver for each major version of CUDA; programs of its minor versions run on it, too.
FIRST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
# Xids that a faulty program causes, not a faulty GPU.
PROGRAMS_XIDS = (13, 31, 43, 45)
# The first compute capability with which vLLM runs bfloat16.
AMPERE = (8, 0)
# Other processes may have this much of a GPU: a desktop or a monitor has less.
OTHERS_BYTES = 1 << 30
LOG_S = 20.0
ABSENT = (
    "nvidia-smi is not installed, so whether a run fits the GPUs is not checked",
    "install the driver's tools; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
)


def driver_fault(driver: str, cuda: str) -> str | None:
    """Say what is wrong if `driver` is too old for programs that are built for this version of CUDA."""
    first = FIRST_DRIVERS.get(int(cuda.partition(".")[0]))
    try:
        if first is None or Version(driver) >= Version(first):
            return None
    except InvalidVersion:
        return None
    return f"driver {driver} is too old for torch, which is built for CUDA {cuda}: it needs {first} or newer"


def faults(gpus: Sequence[Gpu], log: str) -> Iterator[str]:
    """Say which of these GPUs is faulty; `log` is the kernel's since the machine was started."""
    found = re.findall(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+), *(.*)", log)
    # The last text of each Xid, by GPU (0000:3b:00) and number.
    reported = {(short_bus(bus), int(number)): text.strip() for bus, number, text in found}
    for gpu in gpus:
        if gpu.ecc_errors:
            yield f"{gpu.name}: {gpu.ecc_errors} memory errors that ECC could not correct"
        if gpu.is_worn:
            yield f"{gpu.name}: faulty memory is to be replaced at the next reset"
        for (bus, number), text in reported.items():
            if bus == gpu.bus and number not in PROGRAMS_XIDS:
                yield f"{gpu.name}: Xid {number} in the kernel's log since the machine was started ({text})"


DRIVER_CURE = (
    "update the driver, install a torch that is built for an older CUDA, or on a data-centre GPU install "
    "cuda-compat and put its directory into LD_LIBRARY_PATH"
)
FAULTS_CURE = (
    "reset the GPU (`nvidia-smi -r`) or restart the machine; if it comes again, have the GPU replaced, or "
    "choose others with CUDA_VISIBLE_DEVICES"
)
OTHERS_CURE = "end what uses them, or choose others with CUDA_VISIBLE_DEVICES"


def _kernel_log() -> str:
    """Return the kernel's log; empty if this user may not read it."""
    try:
        done = subprocess.run(
            ["dmesg"], capture_output=True, text=True, errors="replace", timeout=LOG_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def state() -> Finding:
    """Check the driver and the hardware of the GPUs, and that no other process has much of their memory."""
    if not is_installed():
        return doubtful(*ABSENT)
    gpus, log = visible_gpus(), _kernel_log()
    failed, processes = dict[str, str](), ""
    if old := _driver_fault(gpus[0]):
        failed[old] = DRIVER_CURE
    try:
        processes = ask("--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader")
    except DataError as error:
        said, _, cure = str(error).rpartition("; ")
        failed[said] = cure
    found = failed | _doubtful(gpus, log) | dict.fromkeys(others(gpus, processes), OTHERS_CURE)
    if found:
        verdict = wrong if failed else doubtful
        return verdict("; ".join(found), "; ".join(dict.fromkeys(found.values())))
    read = "no Xid in the kernel's log" if log else "the kernel's log cannot be read here"
    return fine(f"driver {gpus[0].driver}; no uncorrected memory errors; {read}; memory is free")


def others(gpus: Sequence[Gpu], processes: str) -> Iterator[str]:
    """Say of which GPUs others use the memory; `processes` are the rows of nvidia-smi: GPU, id, name."""
    rows = [[cell.strip() for cell in line.split(",")] for line in processes.splitlines()]
    for gpu in gpus:
        if gpu.used_bytes > OTHERS_BYTES:
            # A container sees no processes of its host, so there may be none.
            who = ", ".join(f"process {row[1]} ({row[2]})" for row in rows if row[0] == gpu.uuid)
            used = f"{data_size(gpu.used_bytes)} of {data_size(gpu.total_bytes)} are in use"
            yield f"{gpu.name}: {used}{' by ' if who else ''}{who}"


def require_usable_gpus(config: Config) -> None:
    """Raise ConfigError if the driver is too old for torch or a GPU for `model.dtype`, DataError if the
    driver does not answer."""
    if config.learner.device == "cpu" or not count_gpus() or not is_installed():
        return
    gpus = visible_gpus()
    if old := _driver_fault(gpus[0]):
        raise ConfigError(f"{old}; {DRIVER_CURE}")
    for gpu in gpus:
        if config.model.dtype == "bfloat16" and () < gpu.capability < AMPERE:
            found = f"{gpu.name} has compute capability {'.'.join(map(str, gpu.capability))}"
            raise ConfigError(
                f"model.dtype is bfloat16, but {found}, and vLLM needs 8.0 (Ampere) for it; set "
                "model.dtype=float32, or choose newer GPUs with CUDA_VISIBLE_DEVICES"
            )


def gpu_doubts(config: Config) -> Iterator[str]:
    """Warn of what may end a run on this machine's GPUs, and of what could not be checked."""
    if config.learner.device == "cpu" or not count_gpus():
        return
    if not is_installed():
        yield "; ".join(ABSENT)
        return
    try:
        gpus = visible_gpus()
    except DataError as error:
        yield str(error)
        return
    for found, cure in _doubtful(gpus, _kernel_log()).items():
        yield f"{found}; {cure}"
    if order := other_order():
        found = (
            f"{ORDER_VARIABLE} is {order}, so CUDA may number GPUs in another order than nvidia-smi, by which"
        )
        yield f"{found} the run is planned; unset it, or name GPUs in CUDA_VISIBLE_DEVICES by UUID"


def _doubtful(gpus: Sequence[Gpu], log: str) -> dict[str, str]:
    """Return faults, and what an old driver, which all GPUs share, leaves unchecked; each with its cure."""
    found = dict.fromkeys(faults(gpus, log), FAULTS_CURE)
    if unknown := ", ".join(gpus[0].unknown):
        found[f"driver {gpus[0].driver} does not know {unknown}, so this is not checked"] = (
            "update the driver"
        )
    return found


def _driver_fault(gpu: Gpu) -> str | None:
    import torch

    cuda: str | None = torch.version.cuda
    return driver_fault(gpu.driver, cuda) if cuda and not driver_is_replaced() else None
