"""What prompts without a chat template need of a tokenizer, without transformers, which takes seconds."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer


class FileTokenizer:
    """The tokenizer.json of a directory, with the names that transformers has for the same."""

    chat_template = None

    def __init__(self, directory: Path) -> None:
        """Raises what reading the files raises."""
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.no_truncation()
        named = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokens = (named.get(key) for key in ("bos_token", "eos_token"))  # text, a mapping with it, or none
        self.bos_token, self.eos_token = (
            token["content"] if isinstance(token, dict) else token for token in tokens
        )
        self.added_tokens_decoder = self._tokenizer.get_added_tokens_decoder()

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self._tokenizer.token_to_id(self.eos_token)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(one) or "" for one in ids]
