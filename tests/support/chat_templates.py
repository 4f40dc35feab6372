# ruff: noqa: RUF001 - DeepSeek writes its special tokens with wide bars
"""Real chat templates, from the wheel of TRL, with a small BPE tokenizer that has their special tokens."""

import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from asyncrl.session.chat_template import TemplateRenderer

# The tokens that end an answer, as the models' generation configs list them. The first is the usual one.
STOPS = {
    "cohere2": ("<|END_OF_TURN_TOKEN|>",),
    "deepseekv3": ("<｜end▁of▁sentence｜>",),
    "gemma3": ("<end_of_turn>", "<eos>"),
    "gemma4_v5": ("<turn|>", "<eos>", "<|tool_response>"),
    "glm4moe": ("<|user|>", "<|observation|>", "<|endoftext|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "lfm2_v2": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|end_of_text|>"),
    "llama3_1": ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    "llama3_2": ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    "muse_glimmer": ("<|eot|>",),
    "nemotron_3_super": ("<|im_end|>", "</s>"),
    "phi3": ("<|end|>", "<|endoftext|>"),
    "qwen2_5": ("<|im_end|>", "<|endoftext|>"),
    "qwen3": ("<|im_end|>", "<|endoftext|>"),
    "qwen3_5_think": ("<|im_end|>", "<|endoftext|>"),
    "qwen3_8": ("<|im_end|>", "<|endoftext|>"),
    "qwen3_instruct_2507": ("<|im_end|>", "<|endoftext|>"),
}
# Templates that refuse or ignore tools.
WITHOUT_TOOLS = {"cohere2", "gemma3", "llama3", "phi3"}
_SPECIAL = re.compile(r"<[|｜][^<>{}' ]{1,40}>|<[^<>{}' |｜]{1,40}[|｜]>|<(?:start|end)_of_turn>")


def template_text(name: str) -> str:
    """The Jinja source; only the file is read, because TRL's code is not needed."""
    (place,) = find_spec("trl").submodule_search_locations  # type: ignore[union-attr]
    return (Path(place) / "chat_templates" / f"{name}.jinja").read_text()


@functools.cache
def _trained() -> str:
    """A byte-level BPE of 700 entries, trained on the templates themselves."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([template_text(name) for name in sorted(STOPS)], trainer)
    return tokenizer.to_str()


def tokenizer_of(name: str) -> Any:
    """A tokenizer with the template `name` and its special tokens."""
    source = template_text(name)
    tokenizer = Tokenizer.from_str(_trained())
    specials = [*STOPS[name], "<bos>", *sorted(set(_SPECIAL.findall(source)) - {*STOPS[name]})]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token=STOPS[name][0])
    fast.chat_template = source
    return fast


@functools.cache
def renderer_of(name: str) -> TemplateRenderer:
    """The renderer of the template `name`."""
    tokenizer = tokenizer_of(name)
    return TemplateRenderer(tokenizer, tokenizer.convert_tokens_to_ids(list(STOPS[name])))
