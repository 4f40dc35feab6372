"""FLOPs by formula against those that torch counts in real models, and the peaks of GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.sections import ModelConfig
from asyncrl.hosting.machine import read_model
from asyncrl.hosting.memory_use import ModelShape
from asyncrl.trainer.meter import forward_flops, is_known, peak_flops_per_s, step_flops

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 500,
}
TOKENS = 96
QWEN = ModelShape(
    parameters=494_032_768, layers=24, hidden=896, intermediate=4864, query=896, kv=128, vocabulary=151936
)


def shape_and_model(directory: Path, kind: str, **sizes: object) -> tuple[ModelShape, torch.nn.Module]:
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    config.save_pretrained(directory)
    return read_model(ModelConfig(path=str(directory)))[1], AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    )


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("qwen2", {"tie_word_embeddings": True}), ("llama", {}), ("qwen3", {"head_dim": 96})],
)
@pytest.mark.parametrize("backward", [False, True])
def test_the_formula_counts_what_torch_counts(tmp_path, kind, sizes, backward):
    shape, model = shape_and_model(tmp_path, kind, **sizes)
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.arange(TOKENS)[None]).logits
        if backward:
            logits.sum().backward()
    by_operator = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    # Eager attention multiplies all pairs of tokens, in `bmm`; everything else is a product with weights.
    squares = by_operator.pop("aten.bmm")
    weights = sum(by_operator.values())
    passes = 3 if backward else 1
    all_pairs = passes * 4 * TOKENS**2 * shape.query * shape.layers
    causal = all_pairs * (TOKENS + 1) // (2 * TOKENS)
    flops = (step_flops if backward else forward_flops)(shape, [TOKENS], TOKENS)
    assert is_known(shape)
    assert weights == flops - causal
    assert squares == pytest.approx(all_pairs, rel=0.01)  # it also holds the angles of the positions


def test_a_known_model_by_hand():
    # 6 N + 12 L H Q T of a sequence of 2,048 tokens, with half of the pairs and without norms and biases.
    tokens = 2048
    palm = 6 * QWEN.parameters + 12 * QWEN.layers * QWEN.query * tokens / 2
    assert step_flops(QWEN, [tokens], tokens) == pytest.approx(tokens * palm, rel=0.001)
    # Without logits, the tied table of embeddings is in no product.
    without = 6 * (QWEN.parameters - QWEN.vocabulary * QWEN.hidden) + 12 * QWEN.layers * QWEN.query * 1024
    assert step_flops(QWEN, [tokens], 0) == pytest.approx(tokens * without, rel=0.001)


def test_attention_counts_each_sequence_for_itself():
    packed, one = forward_flops(QWEN, [10, 20], 30), forward_flops(QWEN, [30], 30)
    pairs = 30 * 31 // 2 - 10 * 11 // 2 - 20 * 21 // 2
    assert one - packed == 4 * pairs * QWEN.query * QWEN.layers
    assert packed == forward_flops(QWEN, [10], 10) + forward_flops(QWEN, [20], 20)
    assert forward_flops(QWEN, [], 0) == 0


def test_other_kinds_of_layers_are_not_known(tmp_path):
    assert is_known(QWEN)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 320}
    for kind, sizes in (("qwen3_moe", experts), ("gpt_neox", {})):
        assert not is_known(shape_and_model(tmp_path, kind, **sizes)[0]), kind
    assert not is_known(replace(QWEN, parameters=QWEN.parameters // 2))


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_a_gpu_that_is_not_in_the_table_has_no_peak(gpu, peak):
    assert peak_flops_per_s(gpu) == peak
