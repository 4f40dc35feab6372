"""Attention over packed sequences that never builds an N x N mask.

Transformers makes no mask for an attention whose name it does not know. So the function registered here gets
all sequences end to end, without a mask; the model's forward passes on the offset of each sequence.

Axes in names:  H heads, N packed tokens, D head size.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from asyncrl.errors import ConfigError

# Name of `segment_attention` in transformers' registry.
SEGMENTS = "asyncrl_segments"
# Arguments of architectures whose attention is more than plain softmax attention.
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def segment_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_starts: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, N, H, D]: causal attention within each sequence, by one fused kernel each. Raises ConfigError."""
    extras = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    lengths = [stop - start for start, stop in pairwise(sequence_starts)]
    if sliding_window is not None and max(lengths) > sliding_window:
        extras.append(f"sliding_window {sliding_window} on {max(lengths)} tokens")
    if extras:
        raise ConfigError(
            f"model: {type(module).__name__} needs {', '.join(extras)}, which packed attention without "
            "flash-attention lacks; install flash-attn on a GPU, or choose a model with plain causal "
            "attention"
        )
    grouped = query_1HND.shape[1] != key_1HND.shape[1]
    columns = (torch.split(column_1HND, lengths, dim=2) for column_1HND in (query_1HND, key_1HND, value_1HND))
    outputs = [
        scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        for query, key, value in zip(*columns, strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(SEGMENTS, segment_attention)


def choose_attention(device: torch.device, dtype: torch.dtype) -> str:
    """Name flash attention if it is installed and runs on `device` with `dtype`, else `SEGMENTS`."""
    if device.type == "cuda" and dtype != torch.float32:
        if is_flash_attn_3_available():
            return "flash_attention_3"
        if is_flash_attn_2_available():
            return "flash_attention_2"
    return SEGMENTS


def attention_kwargs(attention: str, sequence_starts: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Arguments that describe the packing to the attention, for the model's forward."""
    if attention == SEGMENTS:
        return {"sequence_starts": sequence_starts}
    offsets = torch.tensor(sequence_starts, dtype=torch.int32, device=device)
    longest = max(stop - start for start, stop in pairwise(sequence_starts))
    return {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }
