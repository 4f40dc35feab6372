"""Counts what one rank's models compute, and reads how much of its GPU's memory torch used.

The floating-point operations of its work, divided by what a GPU could do in the same time, are the model
FLOPs utilisation (MFU). Only what the mathematics needs is counted, a multiplication and an addition as two,
and the backward pass as twice the forward pass. What gradient checkpointing and the output layer's chunks
compute again is not counted; with it the ratio would be the hardware's (HFU).
Source: Chowdhery et al. 2022, PaLM (arXiv:2204.02311), appendix B, where a token needs 6 N + 12 L H Q T: N
weights, L layers with H heads of size Q, and T tokens. Two terms are smaller here. A token attends only to
itself and those before it in its own sequence, which is about half of T, and only action tokens need logits.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

import torch

from asyncrl.hosting.memory_use import ModelShape
from asyncrl.trainer.base import MicroBatch, Usage

BACKWARD = 2  # a gradient for each of the two factors of every product
# Dense bfloat16 with float32 sums, without sparsity, by the name that CUDA gives the GPU; from NVIDIA's
# data sheets. MIG slices and laptops have other names and other speeds.
PEAK_FLOPS_PER_S = {
    r"B200": 2250e12,
    r"H200": 989.4e12,
    r"H100( 80GB HBM3)?": 989.4e12,
    r"H100 NVL": 835.5e12,
    r"H100 PCIe": 756e12,
    r"A100(-SXM4-\d+GB|-PCIE-\d+GB| 80GB PCIe)": 312e12,
    r"L40S": 362e12,
    r"L4": 121e12,
    r"GeForce RTX 4090": 165.2e12,
}
# Norms and biases, the only parameters that are in no product, are a smaller share of a model's parameters.
OTHER_SHARE = 0.02


def peak_flops_per_s(gpu: str) -> float | None:
    """The peak of a GPU by its name, for example "NVIDIA H100 PCIe"; None if it is not in the table."""
    name = gpu.removeprefix("NVIDIA ")
    return next((peak for names, peak in PEAK_FLOPS_PER_S.items() if re.fullmatch(names, name)), None)


def forward_flops(shape: ModelShape, lengths: Sequence[int], logits: int) -> int:
    """Return those of a forward pass over sequences of `lengths`, with the logits of `logits` tokens.

    Layers are of Llama's kind; see `is_known`. A sequence of n tokens has n (n + 1) / 2 pairs of a query and
    a key, and each pair costs a product with the key and one with the value.
    """
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    attention = 2 * 2 * pairs * shape.query * shape.layers
    return attention + _weight_flops(shape, lengths, logits)


def _weight_flops(shape: ModelShape, lengths: Sequence[int], logits: int) -> int:
    """Return those of the products with weights; for the weights' gradients they are as many."""
    weights = 2 * sum(lengths) * _layer_weights(shape) * shape.layers
    return weights + 2 * logits * shape.hidden * shape.vocabulary


def step_flops(shape: ModelShape, lengths: Sequence[int], logits: int) -> int:
    """Return those of a forward and a backward pass. Below an adapter, weights have no gradient."""
    both = (1 + BACKWARD) * forward_flops(shape, lengths, logits)
    return both - (_weight_flops(shape, lengths, logits) if shape.adapter else 0)


def is_known(shape: ModelShape) -> bool:
    """Whether the model has as many parameters as one with layers of Llama's kind, with or without its own
    output layer. Otherwise, for example with experts, the FLOPs here are not those of the model.
    """
    embedding, layers = shape.vocabulary * shape.hidden, shape.layers * _layer_weights(shape)
    others = [shape.parameters - layers - tables * embedding for tables in (1, 2)]
    return any(0 <= other <= OTHER_SHARE * shape.parameters for other in others)


def _layer_weights(shape: ModelShape) -> int:
    """Return the weights of queries, keys, values and output, and of gate, up and down."""
    return shape.hidden * (2 * shape.query + 2 * shape.kv + 3 * shape.intermediate)


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
