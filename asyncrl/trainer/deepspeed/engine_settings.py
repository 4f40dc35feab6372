"""DeepSpeed's configuration."""

import os
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from asyncrl.errors import ConfigError
from asyncrl.hosting.memory_use import BUCKET_NUMBERS, GATHERED_WEIGHTS

# Steps between DeepSpeed's own progress lines: it prints none.
NEVER = 1 << 62


def require_device(device: torch.device) -> None:
    """Raise ConfigError if DeepSpeed runs on another kind of device."""
    if (chosen := get_accelerator().device_name()) != device.type:
        raise ConfigError(
            f"learner.device: this rank is on {device.type}, but DeepSpeed runs on {chosen}; set the "
            f"environment variable DS_ACCELERATOR={device.type}, or learner.device={chosen}"
        )


def join_deepspeed(local_rank: int) -> None:
    """Let DeepSpeed use the existing process group."""
    # DeepSpeed fills this table by running compilers for a second, only to find an op for inference.
    deepspeed.ops.__compatible_ops__ = {}
    os.environ["LOCAL_RANK"] = str(local_rank)  # deepspeed.initialize has no argument for it
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def shard_settings(dtype: str) -> dict[str, Any]:
    """What DeepSpeed must know of a model to share out its parameters for ZeRO 3, while it is loaded."""
    return {
        # The trainer sets accumulation boundaries itself; these two keys only have to be consistent.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": dtype == "bfloat16"},
    }


def size_of(parameter: nn.Parameter) -> int:
    """Return how many numbers of a parameter all ranks have together."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def engine_settings(module: nn.Module, *, dtype: str, stage: int, offload: bool = False) -> dict[str, Any]:
    """DeepSpeed's configuration of a sharded model, without an optimizer, whose state may be offloaded."""
    numbers = sum(size_of(parameter) for parameter in module.parameters() if parameter.requires_grad)
    zero: dict[str, Any] = {
        "stage": stage,
        # The whole of it is allocated; DeepSpeed takes no 0 for a model that is frozen.
        "reduce_bucket_size": max(1, min(numbers, BUCKET_NUMBERS)),
        "stage3_max_live_parameters": GATHERED_WEIGHTS,
        "stage3_max_reuse_distance": GATHERED_WEIGHTS,
    }
    return shard_settings(dtype) | {
        "steps_per_print": NEVER,
        "zero_optimization": zero | ({"offload_optimizer": {"device": "cpu"}} if offload else {}),
    }
