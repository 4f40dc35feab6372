"""Reads the shape of a model and the memory of this machine without loading the model or using the GPUs."""

from dataclasses import dataclass
from typing import Any

import psutil

from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.errors import DataError
from asyncrl.launch.gpus import count_gpus
from asyncrl.launch.nvidia import visible_gpus
from asyncrl.trainer.deepspeed.memory_use import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory that a run may use."""

    memory_bytes: int  # of the host, available now
    gpu_bytes: tuple[int, ...]  # total of each GPU
    others_bytes: tuple[int, ...] = ()  # of each GPU, used by other processes now; empty if unknown

    def used_by_others(self, gpu: int) -> int:
        """Return the bytes of a GPU that other processes use."""
        return self.others_bytes[gpu] if self.others_bytes else 0


def this_machine(device: str) -> Machine:
    """Return the memory of this machine for a run whose `learner.device` is `device`. Raises DataError."""
    memory = psutil.virtual_memory()
    if device == "cpu" or not count_gpus():
        return Machine(memory_bytes=memory.available, gpu_bytes=())
    gpus = visible_gpus()
    return Machine(
        memory_bytes=memory.available,
        # A GPU without memory of its own uses the host's.
        gpu_bytes=tuple(gpu.total_bytes or memory.total for gpu in gpus),
        others_bytes=tuple(gpu.used_bytes for gpu in gpus),
    )


def read_shape(model: ModelConfig, learner: LearnerConfig | None = None) -> ModelShape:
    """Return the shape of a model from its config.json; the meta device counts each parameter once.

    With a `learner`, what the layers keep for its backward pass is counted, too.

    Raises:
        DataError: the config cannot be read, or transformers does not know the architecture.
        ConfigError: the learner would refuse the model.
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
    shape = ModelShape.of(config, sum(parameter.numel() for parameter in built.parameters()))
    if learner is None:
        return shape
    from asyncrl.trainer.deepspeed.kept import counted  # slow to import, and a generator needs none of it

    return counted(shape, config, model, learner.gradient_checkpointing)
