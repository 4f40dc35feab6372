"""The floating-point operations of a learner's work, and what a GPU could do in the same time.

Their ratio is the model FLOPs utilisation (MFU): only what the mathematics needs is counted, a multiplication
and an addition as two, and the backward pass as twice the forward pass. What gradient checkpointing and the
output layer's chunks compute again is not counted; with it the ratio would be the hardware's (HFU).
Source: Chowdhery et al. 2022, PaLM (arXiv:2204.02311), appendix B, where a token needs 6 N + 12 L H Q T: N
weights, L layers with H heads of size Q, and T tokens. Two terms are smaller here. A token attends only to
itself and those before it in its own sequence, which is about half of T, and only action tokens need logits.
"""

import re
from collections.abc import Sequence

from asyncrl.hosting.memory_use import ModelShape

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
