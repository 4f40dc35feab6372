"""A Qwen2 of random weights with a tokenizer, made on the spot, so that nothing is downloaded.

Its vocabulary has every character that a prompt here uses; the other tokens are words of their own.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "0123456789+="
PAD, EOS = 0, 1
SIZES: dict[str, dict[str, Any]] = {
    # Qwen2.5-0.5B
    "cuda": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    # Two heads of 32: the smallest that vLLM takes on CPUs.
    "cpu": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}


def make_model(directory: Path, device: str) -> Path:
    """Save the model for "cuda" or "cpu" in bfloat16 into `directory`, with one seed for all."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    sizes = SIZES[device]
    known = ["<pad>", "<eos>", *CHARACTERS]
    known += (f" word{index}" for index in range(len(known), sizes["vocab_size"]))
    words = models.WordLevel({token: index for index, token in enumerate(known)}, unk_token="<pad>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen2Config(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=EOS
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory
