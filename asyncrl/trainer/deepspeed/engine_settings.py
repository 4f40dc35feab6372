"""The device of a rank, and DeepSpeed's configuration."""

import os
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from asyncrl.config.sections import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.hosting.memory_use import BUCKET_NUMBERS, CONTEXT_BYTES, GATHERED_WEIGHTS

# Steps between DeepSpeed's own progress lines: it prints none.
NEVER = 1 << 62


def choose_device(learner: LearnerConfig, local_rank: int, *, auto: str) -> torch.device:
    """This rank's device. Raises ConfigError if DeepSpeed runs on another kind of device.

    `auto` is the kind that `learner.device: auto` means: that of the generators on this machine.
    """
    wanted = auto if learner.device == "auto" else learner.device
    chosen = get_accelerator().device_name()
    if chosen != wanted:
        raise ConfigError(
            f"learner.device: {learner.device} means {wanted} here, but DeepSpeed runs on {chosen}; "
            f"set the environment variable DS_ACCELERATOR={wanted}, or learner.device={chosen}"
        )
    if learner.threads is not None:
        torch.set_num_threads(learner.threads)
    if wanted == "cpu":
        return torch.device("cpu")
    device = torch.device(wanted, local_rank)
    torch.cuda.set_device(device)
    return device


def limit_memory(device: torch.device, share: float) -> None:
    """Keep this process to a share of its GPU's memory, of which CUDA itself takes `CONTEXT_BYTES`."""
    if device.type == "cuda" and share < 1:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(max(0.0, share - CONTEXT_BYTES / total_bytes), device)


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


def engine_settings(module: nn.Module, *, dtype: str, stage: int, offload: bool = False) -> dict[str, Any]:
    """DeepSpeed's configuration of a sharded model, without an optimizer, whose state may be offloaded."""
    numbers = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())
    zero: dict[str, Any] = {
        "stage": stage,
        # The whole of it is allocated.
        "reduce_bucket_size": min(numbers, BUCKET_NUMBERS),
        "stage3_max_live_parameters": GATHERED_WEIGHTS,
        "stage3_max_reuse_distance": GATHERED_WEIGHTS,
    }
    return shard_settings(dtype) | {
        "steps_per_print": NEVER,
        "zero_optimization": zero | ({"offload_optimizer": {"device": "cpu"}} if offload else {}),
    }
