"""What a model keeps for the backward pass, counted by running it on torch's meta device.

Tensors there have a shape and no data, so that a model of any size runs without memory and almost without
time. Axes in names:  H heads, N packed tokens, D head size.
"""

from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import AsyncRLError
from asyncrl.hosting.machine import model_class
from asyncrl.hosting.memory_use import ModelShape
from asyncrl.lora import inject
from asyncrl.trainer.attention import of_text
from asyncrl.trainer.loading import recompute
from asyncrl.trainer.policy import PolicyModule

Setting = bool | Literal["selective"]
# Name of `counted_attention` in transformers' registry.
COUNTED = "asyncrl_counted"
# So many that what does not grow with the tokens, such as a norm's weights in float32, hardly counts; and so
# few that an architecture with a loop over the tokens takes seconds.
TOKENS = 256


class _Kernel(torch.autograd.Function):
    """What fused attention keeps: queries, keys, values, output, and a float32 of each query and head."""

    @staticmethod
    def forward(ctx: Any, query_1HND: Tensor, key_1HND: Tensor, value_1HND: Tensor) -> Tensor:
        _, heads, tokens, _ = query_1HND.shape
        output_1NHD = value_1HND.new_empty(1, tokens, heads, value_1HND.shape[-1])
        logsumexp_HN = query_1HND.new_empty(heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query_1HND, key_1HND, value_1HND, output_1NHD, logsumexp_HN)
        return output_1NHD


def counted_attention(
    module: nn.Module, query_1HND: Tensor, key_1HND: Tensor, value_1HND: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Stand for the learner's attention: torch's own would choose a kernel that keeps N x N numbers."""
    output_1NHD: Tensor = _Kernel.apply(query_1HND, key_1HND, value_1HND)  # type: ignore[no-untyped-call]
    return output_1NHD, None


AttentionInterface.register(COUNTED, counted_attention)


class _Saved:
    """Bytes of the storages that autograd saves, each once, without those of the model itself."""

    def __init__(self, model: nn.Module) -> None:
        self.size_bytes = 0
        own = (tensor.untyped_storage() for tensor in chain(model.parameters(), model.buffers()))
        # A storage on the meta device has no address. Holding it keeps its identity from being used again.
        self._known = {storage._cdata: storage for storage in own}

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage
            self.size_bytes += storage.nbytes()
        return tensor


def counted(shape: ModelShape, config: Any, model: ModelConfig, setting: Setting) -> ModelShape:
    """Return `shape` with the bytes that a token keeps, or with the reason why they cannot be counted.

    `config` is the model's of Hugging Face, and `setting` is `learner.gradient_checkpointing`. Raises
    ConfigError if the learner would refuse the model.
    """
    try:
        return replace(shape, kept_per_token=kept_per_token(config, model, setting))
    except AsyncRLError:
        raise
    except Exception as error:  # noqa: BLE001 - an architecture's own code raises anything
        reason = str(error).strip().partition("\n")[0]
        return replace(shape, uncounted=f"{type(error).__name__}: {reason}")


def kept_per_token(config: Any, model: ModelConfig, setting: Setting) -> int:
    """Return the bytes of a token that all layers and the output layer keep, when most of them exist.

    What is not kept is computed again for one layer, or one MLP, at a time; the largest is added.
    """
    with torch.device("meta"):
        built: Any = model_class(config).from_config(
            deepcopy(config),  # it gets the name of the attention
            dtype=getattr(torch, model.dtype),
            attn_implementation=of_text(config, COUNTED),
            trust_remote_code=model.trust_remote_code,
        )
        if model.lora is not None:
            inject(built, model.lora)
        built.train()
    kept, largest = _run(built, _recomputed(built, setting))
    if setting:
        recompute(built, setting)
        kept = largest + _run(built, [])[0]
    return -(-kept // TOKENS)


def _recomputed(model: nn.Module, setting: Setting) -> list[nn.Module]:
    """Return the modules of which the backward pass computes one at a time again."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if setting == "selective":
        return [layer.mlp for layer in layers if hasattr(layer, "mlp")]
    if setting and not layers:
        raise ValueError("transformers does not know its layers")
    return layers if setting else []


def _run(model: nn.Module, parts: list[nn.Module]) -> tuple[int, int]:
    """Return the bytes that a forward pass of the policy keeps, and those of the largest of its `parts`."""
    saved, before, sizes = _Saved(model), list[int](), [0]
    for part in parts:
        part.register_forward_pre_hook(lambda *_: before.append(saved.size_bytes))
        part.register_forward_hook(lambda *_: sizes.append(saved.size_bytes - before.pop()))
    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        tokens = torch.arange(TOKENS)
        PolicyModule(model)(
            input_ids_N=tokens,
            position_ids_N=tokens,
            sequence_starts=(0, TOKENS),
            source_T=tokens,
            target_T=tokens,
            temperature=1.0,
            chunk=TOKENS,
        )
    return saved.size_bytes, max(sizes)
