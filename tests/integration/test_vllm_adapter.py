"""The adapter in vLLM's worker, without an engine: which numbers its layers get, and which it refuses."""

from contextlib import contextmanager

import pytest
import torch
from vllm.config import get_current_vllm_config
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from asyncrl.config.sections import LoraConfig, ModelConfig
from asyncrl.engine.vllm.adapter import Adapter, _add_product
from asyncrl.engine.vllm.args import adapter_args
from asyncrl.errors import ConfigError
from asyncrl.lora import adapter_plan
from tests.support.adapters import ALPHA, LORA, RANK, adapted, tensors_of
from tests.support.vllm_engines import STORIES, needs_stories
from tests.support.vllm_models import built

pytestmark = [pytest.mark.integration, needs_stories]

QKV, DOWN = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.down_proj"


@contextmanager
def opened(*targets, served=None):
    """(adapter, the layers that vLLM has given one), of which vLLM may serve other targets."""
    lora = LoraConfig(**LORA, targets=targets)
    settings, shapes = adapter_plan(ModelConfig(path=str(STORIES)), lora)
    with built(STORIES, **adapter_args(settings | ({"target_modules": served} if served else {}))) as (
        model,
        _,
    ):
        config = get_current_vllm_config()
        manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
        manager.create_lora_manager(model, config)
        yield Adapter(manager, settings, shapes, ""), manager._adapter_manager.modules


def copies(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_has(layers, tensors):
    """Both matrices of each part, the second one multiplied by alpha / rank once."""
    parts = {QKV: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], DOWN: ["mlp.down_proj"]}
    for layer, names in parts.items():
        for part, name in enumerate(names):
            down, up = (tensors[f"base_model.model.model.layers.0.{name}.lora_{m}.weight"] for m in "AB")
            found = layers[layer]
            assert torch.equal(found.lora_a_stacked[part][0, 0], down)
            assert torch.equal(found.lora_b_stacked[part][0, 0], up * (ALPHA / RANK))


def test_each_layer_has_the_tensors_of_the_last_adapter_also_after_one_that_failed_in_the_middle():
    first, second = (tensors_of(adapted(STORIES, seed)) for seed in (1, 2))
    with opened() as (adapter, layers):
        assert_has(layers, {name: torch.zeros_like(tensor) for name, tensor in first.items()})
        for sent in (first, second, first):
            adapter.replace(copies(sent))
            assert_has(layers, sent)
        torn = copies(second) | {f"base_model.model.{DOWN}.lora_A.weight": torch.zeros(2 * RANK, 1)}
        with pytest.raises(RuntimeError):
            adapter.replace(torn)
        adapter.replace(copies(second))
        assert_has(layers, second)


def test_a_target_that_vllm_would_ignore_is_named():
    with (
        pytest.raises(
            ConfigError, match=r"cannot serve an adapter of model\.layers\.0\.self_attn\.o_proj \("
        ),
        opened("q_proj", "o_proj", served=["q_proj"]),
    ):
        pass


def test_the_product_on_a_cpu_is_the_one_that_vllm_computes():
    tokens, hidden, widths = 5, 24, (16, 8, 8)
    x, y = torch.randn(tokens, hidden), torch.randn(tokens, sum(widths) + 4)  # more outputs than the parts
    downs = [torch.randn(1, 1, RANK, hidden) for _ in widths]
    ups = [torch.randn(1, 1, width, RANK) for width in widths]
    theirs = PunicaWrapperCPU(tokens, tokens, "cpu")
    theirs._token_lora_indices.zero_()
    theirs.indices_len[0] = tokens
    expected, found = y.clone(), y.clone()
    theirs.add_lora_linear(expected, x, downs, ups, 0.5, widths)
    _add_product(found, x, downs, ups, 0.5, widths)
    assert not torch.equal(expected, y)
    torch.testing.assert_close(found, expected)
