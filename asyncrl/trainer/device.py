"""The device of a rank, and its share of that GPU's memory."""

import torch

from asyncrl.config.sections import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.hosting.memory_use import CONTEXT_BYTES


def choose_device(learner: LearnerConfig, local_rank: int, *, auto: str) -> torch.device:
    """Return this rank's device, which torch then uses, and set torch's number of threads.

    `auto` is the kind that `learner.device: auto` means: that of the generators on this machine. Raises
    ConfigError if torch finds no such device.
    """
    if learner.threads is not None:
        torch.set_num_threads(learner.threads)
    wanted = auto if learner.device == "auto" else learner.device
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"learner.device: {learner.device} means {wanted} here, but torch {torch.__version__} finds no "
            "usable GPU; set learner.device=cpu, or repair the driver (`asyncrl doctor` shows both)"
        )
    device = torch.device(wanted, local_rank)
    torch.cuda.set_device(device)
    return device


def limit_memory(device: torch.device, share: float) -> None:
    """Keep this process to a share of its GPU's memory, of which CUDA itself takes `CONTEXT_BYTES`."""
    if device.type == "cuda" and share < 1:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(max(0.0, share - CONTEXT_BYTES / total_bytes), device)
