"""Reads the shape of a model and the memory of this machine without loading the model or using the GPUs."""

import subprocess
from dataclasses import dataclass
from typing import Any

import psutil

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import DataError
from asyncrl.launch.gpus import count_gpus, visible_devices
from asyncrl.trainer.deepspeed.memory_use import ModelShape

MIB = 1 << 20
ASK_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory that a run may use."""

    memory_bytes: int  # of the host, available now
    gpu_bytes: tuple[int, ...]  # total of each GPU


def this_machine() -> Machine:
    """Return this machine's memory. Ask nvidia-smi, which makes no CUDA context. Raises DataError."""
    memory_bytes, count = psutil.virtual_memory().available, count_gpus()
    if not count:
        return Machine(memory_bytes=memory_bytes, gpu_bytes=())
    # By name, because it does not heed CUDA_VISIBLE_DEVICES.
    command = ["nvidia-smi", "-i", visible_devices(range(count))]
    command += ["--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        text = f"found {count} GPUs, but nvidia-smi does not show their memory ({error})"
        raise DataError(f"{text}; run `asyncrl doctor`") from error
    gpu_bytes = tuple(int(line) * MIB for line in said.split())
    return Machine(memory_bytes=memory_bytes, gpu_bytes=gpu_bytes)


def read_shape(model: ModelConfig) -> ModelShape:
    """Return the shape of a model from its config.json; the meta device counts each parameter once.

    Raises:
        DataError: the config cannot be read, or transformers does not know the architecture.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(model.path, revision=model.revision, **options)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, **options)
    except (OSError, ValueError) as error:
        found = f"model.path {model.path}: its size cannot be determined ({error})"
        raise DataError(f"{found}; give a Hugging Face directory or name") from error
    return ModelShape.of(config, sum(parameter.numel() for parameter in built.parameters()))
