"""Tiny Hugging Face directories for tests."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHARACTERS = "0123456789+-=abcdefghijklmnopqrstuvwxyz ?"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
"""Two heads of 32: the smallest that vLLM takes on CPUs."""


def tiny_qwen2(directory: Path, *, tied: bool = True, seed: int = 0, **sizes: int) -> Path:
    """A Qwen2 of two layers with a character tokenizer, saved into `directory`; `sizes` replace some of `SIZES`."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        directory
    )
    config = Qwen2Config(
        **({"vocab_size": len(vocabulary)} | SIZES | sizes),
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def tiny_moe(directory: Path, **sizes: Any) -> Path:
    """A Qwen3-MoE of two layers with eight experts, of which a token has two, with the tokenizer of the tiny Qwen2."""
    tiny_qwen2(directory)
    vocabulary = len(["<pad>", "<eos>", *CHARACTERS])
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(
        **({"vocab_size": vocabulary, "head_dim": 8} | SIZES | experts | sizes),
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_()  # routers that differ
    model.save_pretrained(directory)
    return directory


_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": _ROUTED | {"head_dim": 32},
    "deepseek_v3": _ROUTED | _LATENT | {"num_key_value_heads": 2},
}
"""Sizes of models whose experts have other names and shapes in memory than in a checkpoint."""


def tiny_of(directory: Path, kind: str, **sizes: Any) -> Path:
    """A model of two layers of any kind, with the tokenizer of the tiny Qwen2 and biases in its routers."""
    tiny_qwen2(directory)
    given = {"vocab_size": len(CHARACTERS) + 2} | SIZES | EXPERTS.get(kind, {}) | sizes
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **given, bos_token_id=0, eos_token_id=1, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model.save_pretrained(directory)
    return directory


def model_of(directory: Path) -> Any:
    """The model as transformers alone loads it, in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def peft_adapter(base: Path, directory: Path, **settings: Any) -> Any:
    """The model with an adapter by PEFT alone, random in both matrices, that is saved into `directory`."""
    import asyncrl  # noqa: F401, I001 - before peft, it hides libraries that were built for another torch
    import peft

    torch.manual_seed(1)
    chosen: dict[str, Any] = {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "up_proj"],
        "init_lora_weights": False,
    }
    config = peft.LoraConfig(**chosen | settings, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model_of(base), config).eval()
    model.save_pretrained(str(directory))
    return model
