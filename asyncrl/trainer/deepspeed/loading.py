"""Models are loaded from Hugging Face directories, and the policy is exported to one."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import DataError
from asyncrl.trainer.deepspeed.attention import choose_attention
from asyncrl.trainer.deepspeed.recompute import recompute
from asyncrl.trainer.deepspeed.sequence_parallel import require_divisible


def load_model(
    config: ModelConfig,
    device: torch.device,
    *,
    gradient_checkpointing: bool | Literal["selective"] = False,
    sequence_parallel: int = 1,
) -> Any:
    """Load a causal language model without dropout. Raises DataError and ConfigError."""
    dtype = getattr(torch, config.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            revision=config.revision,
            dtype=dtype,
            attn_implementation=choose_attention(device, dtype, sequence_parallel=sequence_parallel > 1),
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"model.path: {config.path} cannot be loaded as a causal language model ({error}); "
            "give a Hugging Face directory with config.json and safetensors, or a hub name"
        ) from error
    # With dropout, equal weights would give different log-probabilities, and ratios other than 1 on-policy.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    require_divisible(model.config, sequence_parallel)
    recompute(model, gradient_checkpointing)
    # Gradient checkpointing needs training mode; without dropout nothing else depends on the mode.
    return model.to(device).train()


def export_model(model: Any, config: ModelConfig, state: dict[str, Tensor], directory: Path) -> None:
    """Write a Hugging Face model directory: `state` as safetensors, the model's config and its tokenizer."""
    model.save_pretrained(directory, state_dict=state)
    tokenizer = AutoTokenizer.from_pretrained(
        config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    tokenizer.save_pretrained(directory)
