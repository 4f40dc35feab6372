"""The vLLM plugin: vLLM loads it in each of its processes before the model, so it imports almost nothing."""

import os
import signal
from functools import partial

from asyncrl.engine.base import OWNER_ENV
from asyncrl.hosting.processes import die_with_parent, die_with_spawner


def register() -> None:
    """Let engine processes end when their generator ends, even by SIGKILL, and use an instance of MIG."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        _place_instances()
    owner = int(os.environ.get(OWNER_ENV, "0"))
    if owner == os.getpid():
        os.register_at_fork(after_in_child=partial(_begin_as_fork, owner))
    elif owner:
        die_with_spawner()


def _begin_as_fork(owner: int) -> None:
    """Vllm loads no plugin again there. Signals are not those of the generator's event loop."""
    die_with_parent(owner)
    signal.set_wakeup_fd(-1)


def _place_instances() -> None:
    """Name the GPU of an instance, where vLLM takes the number of the instance in it for that of a GPU."""
    from vllm.platforms import cuda

    nvml, index_of = cuda.pynvml, cuda.NvmlCudaPlatform.device_control_id_to_physical_device_id

    def index(name: str) -> int:
        if not name.startswith("MIG-"):
            return int(index_of(name))
        nvml.nvmlInit()
        try:
            instance = nvml.nvmlDeviceGetHandleByUUID(name)
            return int(nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)))
        finally:
            nvml.nvmlShutdown()

    cuda.NvmlCudaPlatform.device_control_id_to_physical_device_id = staticmethod(index)
