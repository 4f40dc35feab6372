"""Counts what one rank's models compute, and reads how much of its GPU's memory torch used."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from asyncrl.hosting.memory_use import ModelShape
from asyncrl.trainer.base import MicroBatch, Usage
from asyncrl.trainer.flops import forward_flops, is_known, peak_flops_per_s, step_flops


class Meter:
    """What was used since the last `read`."""

    def __init__(
        self, shape: ModelShape, *, device: torch.device, dtype: str, planned_bytes: int, per_share: int = 1
    ) -> None:
        """`planned_bytes` is what `asyncrl plan` expects that torch needs at most, on a GPU.

        `per_share` ranks divide the work on each micro-batch.
        """
        self._shape, self._device, self._planned_bytes = shape, device, planned_bytes
        self._on_gpu = device.type == "cuda"
        # A float32 product is not among the peaks.
        is_in_table = self._on_gpu and dtype == "bfloat16"
        self._peak = peak_flops_per_s(torch.cuda.get_device_name(device)) if is_in_table else None
        self._flops, self._per_share = 0, per_share

    def forward(
        self, microbatch: MicroBatch, *, shape: ModelShape | None = None, logits: bool = True
    ) -> None:
        """Count a pass without gradient, of a model of another `shape`; a critic has no `logits`."""
        self._flops += forward_flops(shape or self._shape, *_work(microbatch, logits))

    def step(self, microbatches: Sequence[MicroBatch], *, logits: bool = True) -> None:
        """Count the forward and backward passes of an optimizer step."""
        for microbatch in microbatches:
            self._flops += step_flops(self._shape, *_work(microbatch, logits))

    def read(self) -> Usage:
        """Return what was used, and begin again."""
        flops, self._flops = self._flops, 0
        memory: dict[str, int] = {}
        if self._on_gpu:
            memory["allocated_bytes"] = torch.cuda.max_memory_allocated(self._device)
            memory["reserved_bytes"] = torch.cuda.max_memory_reserved(self._device)
            memory["planned_bytes"] = self._planned_bytes
            torch.cuda.reset_peak_memory_stats(self._device)
        return Usage(
            flops=flops // self._per_share if is_known(self._shape) else None,
            peak_flops_per_s=self._peak,
            memory=memory,
        )


def _work(microbatch: MicroBatch, logits: bool) -> tuple[list[int], int]:
    """The lengths of the sequences, and the number of tokens that need logits."""
    lengths = [stop - start for start, stop in pairwise(microbatch.sequence_starts)]
    return lengths, len(microbatch.target_T) if logits else 0
