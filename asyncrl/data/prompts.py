"""Prompts: from a dataset row to token ids, and back from ids to text.

Who adds the special tokens is decided once: a chat template writes its own, so its text is tokenised without any; plain
text gets what the tokenizer adds (a BOS where the model wants one) unless the text already begins with it. Every
prompt is tokenised at start: one that is too long or has no text stops the run before it begins, not after a day.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.schema import DataConfig, ModelConfig, SamplingConfig
from asyncrl.data.dataset import Row, Rows, load_rows
from asyncrl.data.plan import SamplePlan
from asyncrl.errors import DataError
from asyncrl.types import Prompt

log = logging.getLogger(__name__)

_SHOWN = 5
"""Rows named in a message."""


@dataclass(frozen=True, slots=True)
class _Renderer:
    """Makes one row a prompt."""

    data: DataConfig
    chat_template: bool
    tokenizer: Any

    def prompt(self, row: Row, where: str) -> Prompt:
        text = self._chat(row, where) if self.chat_template else self._text(row, where)
        return Prompt(token_ids=tuple(self._tokenize(text)), text=text, row=row)

    def _text(self, row: Row, where: str) -> str:
        value = self._value(row, where)
        if not isinstance(value, str):
            raise DataError(
                f"{where}: column `{self.data.prompt_field}` holds a {type(value).__name__}; without a template it must be text "
                "(set model.chat_template: true for chat messages)"
            )
        if not value:
            raise DataError(f"{where}: the prompt is empty; remove the row")
        return value

    def _chat(self, row: Row, where: str) -> str:
        value = self._value(row, where)
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else list(_checked_messages(value, where))
        if self.data.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.data.system})
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _value(self, row: Row, where: str) -> Any:
        try:
            return row[self.data.prompt_field] if self.data.template is None else self.data.template.format_map(row)
        except KeyError as error:
            wanted = "data.prompt_field" if self.data.template is None else "data.template"
            raise DataError(f"{where}: {wanted} wants column `{error.args[0]}`; the row has {sorted(row)}") from error
        except (ValueError, IndexError, AttributeError) as error:
            raise DataError(f"data.template is no valid template ({error}); write {{column}}, and {{{{ for a brace") from error

    def _tokenize(self, text: str) -> list[int]:
        bos = self.tokenizer.bos_token
        add_special = not self.chat_template and not (bos and text.startswith(bos))
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special)["input_ids"]
        # Some tokenizers also end every text; a prompt that already ends would get an empty answer.
        while add_special and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return ids


class PromptSource:
    """The prompt of every ticket, and the held-out prompts."""

    def __init__(self, data: DataConfig, model: ModelConfig, sampling: SamplingConfig, *, seed: int) -> None:
        """Loads and tokenises all prompts. Raises DataError naming the rows that cannot be used."""
        self.tokenizer = load_tokenizer(model)
        if model.chat_template and not self.tokenizer.chat_template:
            raise DataError(f"model.chat_template is true, but the tokenizer of {model.path} has none; set it to false")
        render = _Renderer(data, model.chat_template, self.tokenizer)
        self.rows = load_rows(data.train, data.split)
        self._train = _render_all(render, self.rows, sampling.max_prompt_tokens)
        self._eval: list[Prompt] = []
        if data.eval is not None:
            self._eval = _render_all(render, load_rows(data.eval, data.eval_split), sampling.max_prompt_tokens)
            _warn_of_overlap(self._train, self._eval, data)
        self.plan = SamplePlan(len(self.rows), seed=seed, shuffle=data.shuffle)

    def prompt(self, ticket_id: int) -> Prompt:
        """What training ticket `ticket_id` (from 1) asks for."""
        return self._train[self.plan.at(ticket_id).row]

    def eval_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts, or all when there are fewer."""
        return self._eval[:count]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of response tokens, without special tokens and exactly as sampled otherwise."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def load_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of the policy (a `transformers` tokenizer)."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(
            f"model.path {model.path}: no tokenizer could be loaded ({error}); give a Hugging Face directory or name"
        ) from error


def _render_all(render: _Renderer, rows: Rows, limit: int) -> list[Prompt]:
    prompts = [render.prompt(row, f"{rows.source}, row {index}") for index, row in enumerate(rows)]
    if too_long := [index for index, prompt in enumerate(prompts) if len(prompt.token_ids) > limit]:
        shown = ", ".join(f"row {index}: {len(prompts[index].token_ids)} tokens" for index in too_long[:_SHOWN])
        longest = max(len(prompt.token_ids) for prompt in prompts)
        raise DataError(
            f"{rows.source}: {len(too_long)} of {len(rows)} prompts are longer than sampling.max_prompt_tokens ({limit}): {shown}"
            f"{', ...' if len(too_long) > _SHOWN else ''}; raise it to {longest} or remove the rows"
        )
    return prompts


def _checked_messages(value: object, where: str) -> Sequence[Mapping[str, str]]:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    ):
        raise DataError(
            f"{where}: found `{str(value)[:80]}`; a chat prompt is text or a list of messages with `role` and `content`"
        )
    return value


def _warn_of_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt], data: DataConfig) -> None:
    seen = {prompt.text for prompt in train}
    if shared := [index for index, prompt in enumerate(held_out) if prompt.text in seen]:
        log.warning(
            "%d of %d prompts in data.eval (%s) also occur in data.train, first in row %d: the evaluation is not held out",
            len(shared), len(held_out), data.eval, shared[0],
        )  # fmt: skip
