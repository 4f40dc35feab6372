"""Finds room on the GPUs for the engine of a command, next to a run or other programs."""

from asyncrl.config.schema import Config
from asyncrl.config.sections import GeneratorConfig
from asyncrl.errors import DataError
from asyncrl.hosting.gpus import count_gpus, has_instances, resolve_device
from asyncrl.hosting.machine import read_shape, this_machine
from asyncrl.hosting.memory_use import CONTEXT_BYTES, generator_kv_bytes, sequence_kv_bytes
from asyncrl.hosting.placement import GENERATORS_SHARE, MARGIN
from asyncrl.hosting.smi import is_installed
from asyncrl.telemetry.text import data_size


def room_on_gpus(config: Config) -> tuple[list[int], GeneratorConfig]:
    """Return the GPUs with the most free memory, and the settings of an engine that fits there.

    `generator.gpu_memory_utilization` and `kv_cache_gib` are upper limits. On a CPU, and without nvidia-smi,
    there are no GPUs to choose, and the settings are those of the config.

    Raises:
        DataError: there are too few GPUs, they have too little free memory, or nvidia-smi does not answer.
    """
    generator, width = config.generator, config.generator.tensor_parallel
    if resolve_device(config) == "cpu" or not is_installed():
        return [], generator
    if has_instances() and count_gpus() > 1:
        found = f"{count_gpus()} instances of MIG are visible, and nvidia-smi does not say which one is free"
        raise DataError(f"{found}; name one in CUDA_VISIBLE_DEVICES")
    machine = this_machine(config.learner.device)
    used = {gpu: machine.used_by_others(gpu) / total for gpu, total in enumerate(machine.gpu_bytes)}
    gpus = sorted(used, key=used.__getitem__)[:width]
    if len(gpus) < width:
        found = f"generator.tensor_parallel is {width}, and this process sees {len(gpus)} GPUs"
        raise DataError(f"{found}; add generator.tensor_parallel={len(gpus)} to the command")
    fullest, smallest_bytes = gpus[-1], min(machine.gpu_bytes[gpu] for gpu in gpus)
    # vLLM starts only if its whole share is free beside its CUDA context.
    margin = max(MARGIN, CONTEXT_BYTES / smallest_bytes)
    share = min(generator.gpu_memory_utilization or GENERATORS_SHARE, 1 - margin - used[fullest])
    allowed_bytes, shape = int(share * smallest_bytes), read_shape(config.model)
    kv_bytes = generator_kv_bytes(shape, config.model, generator, allowed_bytes=allowed_bytes)
    sequence_bytes = sequence_kv_bytes(shape, config)
    if kv_bytes < sequence_bytes:
        needed_bytes = allowed_bytes - kv_bytes + sequence_bytes
        needed = f"the engine needs {data_size(needed_bytes)} of a GPU with the KV cache of one sequence"
        found = f"{data_size(max(allowed_bytes, 0))} of GPU {fullest} may be used"
        raise DataError(f"{needed}, but {found}; end other programs, or add generator.max_running=8")
    kv_gib = min(kv_bytes / 2**30, generator.kv_cache_gib or float("inf"))
    return gpus, generator.model_copy(update={"gpu_memory_utilization": share, "kv_cache_gib": kv_gib})
