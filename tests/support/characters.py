"""A tokenizer with one token per character."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<bos>", "<eos>"]
BOS, EOS = 1, 2
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]


def character_tokenizer(directory: Path, *, pattern: str = "<bos> $A", template: str | None = None) -> str:
    """One token per character; `pattern` says which special tokens stand around a text."""
    vocabulary = {token: index for index, token in enumerate(SPECIALS + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=pattern, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.chat_template = template
    fast.save_pretrained(directory)
    return str(directory)
