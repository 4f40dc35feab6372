"""Gradient checkpointing, of whole layers and of MLPs: equal gradients, and as much memory as is forecast."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.hosting.memory_use import DTYPE_BYTES, ModelShape, kept_at_peak
from asyncrl.trainer.attention import SEGMENTS
from asyncrl.trainer.loading import recompute
from asyncrl.trainer.policy import hidden_states
from tests.support.models import SIZES

Setting = bool | Literal["selective"]
SETTINGS: list[Setting] = [False, True, "selective"]
HIDDEN, INTERMEDIATE, TOKENS = SIZES["hidden_size"], SIZES["intermediate_size"], 96


def model_of(setting: Setting, layers: int, dtype: torch.dtype) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": layers}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=40, attn_implementation=SEGMENTS, **sizes))
    recompute(model, setting)
    return model.to(dtype).train()


def run(model: Qwen2ForCausalLM) -> Tensor:
    ids = torch.arange(TOKENS) % 40
    return hidden_states(model.base_model, ids, torch.arange(TOKENS), sequence_starts=(0, TOKENS))


def kept_bytes(setting: Setting, layers: int, dtype: torch.dtype) -> int:
    """Bytes of the different storages that wait for the backward pass, without the parameters'."""
    model, found = model_of(setting, layers, dtype), {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run(model)
    assert outputs.requires_grad
    return sum(found.values()) - sum(
        found.get(parameter.untyped_storage().data_ptr(), 0) for parameter in model.parameters()
    )


@pytest.mark.parametrize("setting", [True, "selective"])
def test_gradients_are_those_of_kept_activations(setting: Setting) -> None:
    gradients = []
    for each in (False, setting):
        model = model_of(each, 3, torch.float64)
        run(model).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    kept, again = gradients
    assert kept.keys() == again.keys()
    for name, expected in kept.items():
        torch.testing.assert_close(again[name], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_more_layers_keep_what_is_forecast(dtype: Literal["float32", "bfloat16"]) -> None:
    def more(setting: Setting) -> int:
        return kept_bytes(setting, 4, getattr(torch, dtype)) - kept_bytes(setting, 2, getattr(torch, dtype))

    def forecast(setting: Setting) -> int:
        layer_bytes = more(False) // 2 // TOKENS
        two, four = (
            kept_at_peak(
                shape_of(layers), ModelConfig(path="m", dtype=dtype), setting, layer_bytes=layer_bytes
            )
            for layers in (2, 4)
        )
        return TOKENS * (four - two)

    assert [more(setting) for setting in SETTINGS] == [forecast(setting) for setting in SETTINGS]
    assert more(True) == 2 * TOKENS * HIDDEN * DTYPE_BYTES[dtype]
    assert more(False) - more("selective") == 2 * TOKENS * 4 * INTERMEDIATE * DTYPE_BYTES[dtype]


def shape_of(layers: int) -> ModelShape:
    return ModelShape(
        parameters=0, layers=layers, hidden=HIDDEN, intermediate=INTERMEDIATE, query=64, kv=32, vocabulary=40
    )


def test_selective_needs_an_mlp_in_each_layer() -> None:
    model = nn.Sequential(GradientCheckpointingLayer())
    with pytest.raises(ConfigError, match=r"selective recomputes the module `mlp`.*use true, or false"):
        recompute(model, "selective")
    recompute(model, False)


def test_a_model_that_cannot_recompute_its_layers_is_refused() -> None:
    model = model_of(False, 1, torch.float32)
    model.supports_gradient_checkpointing = False  # as JetMoE
    with pytest.raises(ConfigError, match=r"is true, but Qwen2ForCausalLM .* no layers; set it to false"):
        recompute(model, True)
    recompute(model, "selective")
