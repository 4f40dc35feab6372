"""Reads the shape of a model, and the memory and cores of this machine, without using model or GPUs."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl import lora
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.hosting.gpus import count_gpus
from asyncrl.hosting.memory_use import ModelShape
from asyncrl.hosting.nvidia import visible_gpus

# The control groups of this process, and where all are. A container sees its own group as the highest.
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory that a run may use."""

    memory_bytes: int  # of the host or its container, available now
    gpu_bytes: tuple[int, ...]  # total of each GPU
    others_bytes: tuple[int, ...] = ()  # of each GPU, used by other processes now; empty if unknown
    total_bytes: int = 0  # of the host or its container

    def used_by_others(self, gpu: int) -> int:
        return self.others_bytes[gpu] if self.others_bytes else 0


def this_machine(device: str) -> Machine:
    """Return the memory of this machine for a run whose `learner.device` is `device`. Raises DataError."""
    memory = dict(line.split()[:2] for line in MEMORY.read_text().splitlines())
    total, available = (int(memory[f"Mem{one}:"]) << 10 for one in ("Total", "Available"))
    for limit, used, *stat in _limits("memory", "max current stat", "limit_in_bytes usage_in_bytes stat"):
        if limit != "max":
            numbers = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
            whole = "total_" if "total_cache" in numbers else ""  # with the groups below
            cached = sum(numbers.get(f"{whole}{one}_file", 0) for one in ("inactive", "active"))  # free
            total, available = min(total, int(limit)), min(available, int(limit) - int(used) + cached)
    gpus = () if device == "cpu" or not count_gpus() else visible_gpus()
    return Machine(
        memory_bytes=max(1, available),
        total_bytes=total,
        # A GPU without memory of its own uses the host's.
        gpu_bytes=tuple(gpu.total_bytes or total for gpu in gpus),
        others_bytes=tuple(gpu.used_bytes for gpu in gpus),
    )


def share_of_cores(busy: int = 1) -> int:
    """Return the number of threads per process if `busy` processes share this machine.

    A container's quota of processor time counts: the kernel stops all threads when these have used it up.
    """
    cores = len(os.sched_getaffinity(0))
    for quota, period in _limits("cpu", "max", "cfs_quota_us cfs_period_us"):
        if quota not in ("max", "-1"):
            cores = min(cores, max(1, int(quota) // int(period)))
    return max(1, cores // busy)


def _limits(kind: str, files: str, older: str) -> Iterator[list[str]]:
    """Yield the words in files of each control group of this process; in version 1 these are `older`."""
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        root, names = (GROUPS / kind, older) if kinds else (GROUPS, files)
        lowest = root / path.lstrip("/")
        for group in (each for each in (lowest, *lowest.parents) if each.is_relative_to(root)):
            with suppress(OSError):  # the path is another one in the container, or it has no such limit
                yield " ".join((group / f"{kind}.{name}").read_text() for name in names.split()).split()


def model_class(config: Any) -> Any:
    """Return the class of transformers that loads a model with this Hugging Face config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def sees_images(config: Any) -> bool:
    """Whether a model with this Hugging Face config has a vision part."""
    return getattr(config, "vision_config", None) is not None


def freeze_vision(model: Any) -> None:
    """Freeze what a model has besides its language model: the vision tower, and what joins it to the text.

    It is neither trained nor published, so engines keep that of model.path.
    """
    if sees_images(model.config):
        model.requires_grad_(False)
        for part in (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()):
            part.requires_grad_(True)


def routing_sizes(model: ModelConfig) -> Mapping[str, int]:
    """Return the sizes of what routers choose, for `model.router_replay`. Raises as `read_model` does."""
    if not model.router_replay:
        return {}
    from asyncrl import routing

    return routing.routing_sizes(_without_weights(model)[1], model.path)


def read_model(model: ModelConfig) -> tuple[Any, ModelShape]:
    """Return Hugging Face's config of a model and its shape; the meta device counts each parameter once.

    Raises DataError: the config cannot be read, or transformers does not know the architecture. Raises
    ConfigError: the model cannot have the adapter of `model.lora`, or has no experts to replay.
    """
    import torch

    from asyncrl import routing

    config, built = _without_weights(model)
    if model.router_replay:
        _ = routing.routing_sizes(built, model.path)
    freeze_vision(built)
    numbers, adapter, in_4bit = sum(parameter.numel() for parameter in built.parameters()), 0, 0
    frozen = sum(parameter.numel() for parameter in built.parameters() if not parameter.requires_grad)
    if model.lora is not None:
        if sees_images(config):
            found = f"model.lora: {model.path} has a vision part, of whose layers none may have an adapter"
            raise ConfigError(f"{found}; remove model.lora, or choose a model of text only")
        lora.require_usable(model.lora, model.path)
        in_4bit = lora.numbers_in_4bit(built) if model.has_4bit_base else 0
        with torch.device("meta"):
            lora.inject(built, model.lora)
        adapter = sum(parameter.numel() for _, parameter in lora.adapter_tensors(built))
    stacked = sum(each.numel() for each in built.parameters() if each.requires_grad and each.ndim > 2)
    shape = ModelShape.of(config, numbers)
    return config, replace(shape, adapter=adapter, frozen=frozen, in_4bit=in_4bit, stacked=stacked)


def _without_weights(model: ModelConfig) -> tuple[Any, Any]:
    """Return Hugging Face's config of a model, and the model on the meta device. Raises DataError."""
    import torch

    config = model.architecture()
    try:
        with torch.device("meta"):
            built = model_class(config).from_config(config, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        found = f"model.path {model.path}: its size cannot be determined ({error})"
        raise DataError(f"{found}; give a Hugging Face directory or name") from error
    return config, built
