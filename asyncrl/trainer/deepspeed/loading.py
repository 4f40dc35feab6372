"""Loads models from Hugging Face directories, and exports the policy to one."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import DataError
from asyncrl.trainer.deepspeed.attention import choose_attention
from asyncrl.trainer.deepspeed.critic import ValueModule
from asyncrl.trainer.deepspeed.policy import PolicyModule


def load_policy(
    config: ModelConfig, device: torch.device, *, gradient_checkpointing: bool = False
) -> PolicyModule:
    """The model of `config` on `device`, without dropout. Raises DataError if it cannot be loaded."""
    # Gradient checkpointing needs training mode; without dropout nothing else depends on the mode.
    model = _load(config, device, gradient_checkpointing)
    return PolicyModule(model).train()


def load_critic(
    config: ModelConfig, device: torch.device, *, gradient_checkpointing: bool = False
) -> ValueModule:
    """The same model with a new value head in place of its output layer. Raises DataError."""
    model = _load(config, device, gradient_checkpointing)
    return ValueModule(model.base_model).train()


def _load(config: ModelConfig, device: torch.device, gradient_checkpointing: bool) -> Any:
    dtype = getattr(torch, config.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            revision=config.revision,
            dtype=dtype,
            attn_implementation=choose_attention(device, dtype),
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"model.path: {config.path} cannot be loaded as a causal language model ({error}); "
            "give a Hugging Face directory with config.json and safetensors, or a hub name"
        ) from error
    # With dropout, the same weights would give different log-probabilities, and a ratio that is not 1
    # on-policy.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.to(device)


def export_model(model: Any, state: dict[str, Tensor], config: ModelConfig, directory: Path) -> None:
    """Write `state` as safetensors with the model's config and tokenizer: a Hugging Face model directory."""
    model.save_pretrained(directory, state_dict=state)
    tokenizer = AutoTokenizer.from_pretrained(
        config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    tokenizer.save_pretrained(directory)
