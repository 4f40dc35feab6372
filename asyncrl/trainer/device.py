"""The device of a rank, its share of that GPU's memory, and what a learner says when that is full."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncrl.config.sections import LearnerConfig
from asyncrl.errors import ConfigError, MemoryFullError, lacks_gpu_memory
from asyncrl.hosting.memory_use import CONTEXT_BYTES, activation_cures, offload_cures
from asyncrl.hosting.progress import doing


def choose_device(learner: LearnerConfig, local_rank: int, *, auto: str) -> torch.device:
    """Return this rank's device, which torch then uses, and set torch's number of threads.

    `learner.device: auto` means `auto`, the local generators' kind. Raises ConfigError without such a device.
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


@contextmanager
def naming_memory(learner: LearnerConfig, rank: int) -> Iterator[None]:
    """Raise MemoryFullError with the keys to change in place of torch's error, also at the start."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_gpu_memory(error):
            raise
        keys = [
            *activation_cures(learner),
            f"lower learner.logprob_chunk_tokens ({learner.logprob_chunk_tokens})",
        ]
        keys += ["give generators on the same GPU a smaller generator.gpu_memory_utilization"]
        offloaded = offload_cures(learner, learner.zero_stage, [learner.optimizer.kind])
        keys += [f"in a new run {cure}" for cure in offloaded]
        raise MemoryFullError(
            f"rank {rank} of the learner was at {doing()!r} ({str(error).splitlines()[0]}). The same step "
            f"would need as much again: {', '.join(keys)}; `asyncrl plan` shows what takes how much. Then "
            "`asyncrl up` resumes the run"
        ) from error
