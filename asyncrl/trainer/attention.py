"""Attention over packed sequences that never builds an N x N mask.

Transformers makes no mask for an attention whose name it does not know. So the functions registered here get
all sequences end to end, without a mask; the model's forward passes on the offset of each sequence.

Axes in names:  H heads, N packed tokens, D head size.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from asyncrl.errors import ConfigError
from asyncrl.trainer.sequence_parallel import across_ranks

# Names of `segment_attention` and `varlen_attention` in transformers' registry.
SEGMENTS, VARLEN = "asyncrl_segments", "asyncrl_varlen"
# Arguments of architectures whose attention is more than plain softmax attention.
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
# What the kernels behind `varlen_attn` take: a head size up to this, in steps of 8, on GPUs from Ampere on.
LARGEST_HEAD, AMPERE = 256, (8, 0)


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
    lengths = [stop - start for start, stop in pairwise(sequence_starts)]
    longer = sliding_window is not None and max(lengths) > sliding_window
    window = [f"sliding_window {sliding_window} on {max(lengths)} tokens"] if longer else []
    _refuse_extras(module, kwargs, window)
    if query_1HND.is_cuda:
        key_1HND, value_1HND = (repeated(each, query_1HND) for each in (key_1HND, value_1HND))
    grouped = query_1HND.shape[1] != key_1HND.shape[1]
    columns = (torch.split(column_1HND, lengths, dim=2) for column_1HND in (query_1HND, key_1HND, value_1HND))
    outputs = [
        scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        for query, key, value in zip(*columns, strict=True)
    ]
    # As other attentions return it: some architectures take a view of it.
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def repeated(column_1HND: Tensor, query_1HND: Tensor) -> Tensor:
    """Keys or values for each query head. A GPU's kernel for float32 takes no groups, and the one that torch
    would use instead keeps all probabilities."""
    return column_1HND.repeat_interleave(query_1HND.shape[1] // column_1HND.shape[1], dim=1)


def varlen_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Do the same as `segment_attention`, by one kernel for all sequences, and with sliding windows."""
    head = query_1HND.shape[-1]
    if head % 8 or head > LARGEST_HEAD or value_1HND.shape[-1] != head:
        kwargs |= {"scaling": scaling, "sliding_window": sliding_window}
        return segment_attention(module, query_1HND, key_1HND, value_1HND, attention_mask, **kwargs)
    _refuse_extras(module, kwargs)
    left = -1 if sliding_window is None else sliding_window - 1  # tokens before the query's own
    # Several query heads share a key head; the kernel of torch 2.11 always allows it.
    is_asked = "enable_gqa" in inspect.signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": True} if is_asked else {}
    query_NHD, key_NHD, value_NHD = (
        column_1HND.squeeze(0).transpose(0, 1) for column_1HND in (query_1HND, key_1HND, value_1HND)
    )
    output_NHD: Any = varlen_attn(
        query_NHD,
        key_NHD,
        value_NHD,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(left, 0),
        **grouped,
    )
    return output_NHD[None], None


def _refuse_extras(module: nn.Module, arguments: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    extras = [*(name for name in UNSUPPORTED if arguments.get(name) is not None), *others]
    if extras:
        raise ConfigError(
            f"model: {type(module).__name__} needs {', '.join(extras)}, which packed attention without "
            "flash-attention lacks; install flash-attn on a GPU, or choose a model with plain causal "
            "attention"
        )


AttentionInterface.register(SEGMENTS, across_ranks(segment_attention))
AttentionInterface.register(VARLEN, across_ranks(varlen_attention))


def choose_attention(device: torch.device, dtype: torch.dtype, *, sequence_parallel: bool = False) -> str:
    """Name the fastest attention that runs on `device` with `dtype`; `SEGMENTS` runs everywhere.

    Only `SEGMENTS` and `VARLEN` run with `sequence_parallel`. Raises ConfigError if flash-attention is
    installed and cannot be loaded.
    """
    if device.type == "cuda" and dtype != torch.float32:
        if is_flash_attn_3_available() and not sequence_parallel:
            _require_import("flash_attn_interface")
            return "flash_attention_3"
        if is_flash_attn_2_available() and not sequence_parallel:
            _require_import("flash_attn")
            return "flash_attention_2"
        if torch.cuda.get_device_capability(device) >= AMPERE:
            return VARLEN
    return SEGMENTS


def of_text(config: Any, attention: str) -> str | dict[str, str]:
    """Return what makes transformers use `attention` for text only: a vision part keeps its own."""
    text = config.get_text_config()
    parts = {name: attention for name in config.sub_configs if getattr(config, name) is text}
    return {"": attention, **parts} if parts else attention


def _require_import(module: str) -> None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"flash-attention is installed, but `import {module}` fails ({error}): it was built for another "
            f"torch than {torch.__version__}; build it again (pip install --no-build-isolation "
            "--force-reinstall --no-deps flash-attn), or uninstall it, and torch's own attention is used"
        ) from error


def attention_kwargs(attention: str, sequence_starts: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Arguments that describe the packing to the attention, for the model's forward."""
    segments = {"sequence_starts": sequence_starts}
    if attention == SEGMENTS:
        return segments
    offsets = torch.tensor(sequence_starts, dtype=torch.int32, device=device)
    longest = max(stop - start for start, stop in pairwise(sequence_starts))
    packing = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    # With VARLEN, a model of other head sizes uses the segments.
    return packing | segments if attention == VARLEN else packing
