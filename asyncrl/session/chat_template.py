"""A `transformers` tokenizer as the renderer of a session."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from asyncrl.errors import RenderError
from asyncrl.session.chat_messages import Message, is_begun

# Forms of a message with calls: the content if it has no text, and whether arguments are JSON text. Templates
# disagree, so the first form is taken in which the template writes a call.
_FORMS = (("", False), (None, False), ("", True), (None, True))

# A blank in the tokens of SentencePiece, and texts to put before another one whose tokens do not join it.
BLANK, _ANCHORS = "\u2581", ("\n", "0", "a", ".")

_FUNCTION = {"name": "some_name", "arguments": {"some_key": "some_value"}}
_CALL = {"id": "call00001", "type": "function", "function": _FUNCTION}
PROBE: tuple[Message, Message] = (
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
)
"""A conversation that shows how a template writes a call."""


class TemplateRenderer:
    """The `Renderer` of a tokenizer, whose chat template is only needed for messages."""

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int] = ()) -> None:
        """Take the stop tokens of the generation config; the tokenizer's EOS is always one."""
        eos = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids) | (frozenset() if eos is None else {eos})
        added = tokenizer.added_tokens_decoder.values()
        self.special_texts = frozenset(token.content for token in added if token.special)
        # Some tokenizers append an end token to every text, too.
        self.opening_ids = tuple(one for one in tokenizer("")["input_ids"] if one not in self.stop_ids)
        self._opens_with_blank = self._begins_with_blank(self._ids("a"))
        for self._form in (*_FORMS, _FORMS[0]):  # the first one if calls are written in none
            if self._writes_calls():
                break

    def _writes_calls(self) -> bool:
        try:
            text = self.render(PROBE, generation=False)
        except RenderError:
            return False
        is_written = all(part in text for part in ("some_name", "some_key", "some_value"))
        return is_written and not any(wrong in text for wrong in ("None", "'some_key'", '\\"some_key\\"'))

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, generation: bool) -> str:
        is_continued = generation and is_begun(messages)
        # A template is a program of the model's author; it raises what it likes.
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [_in_form(message, *self._form) for message in messages],
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=generation and not is_continued,
                    continue_final_message=is_continued,
                )
            )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages[-8:])
            raise RenderError(
                f"the chat template refuses the messages ({type(error).__name__}: {error}); the roles of the "
                f"last ones are: {roles}; change the messages, or set a template that allows them"
            ) from error

    def encode(self, text: str, *, inside: bool = False) -> list[int]:
        if not inside or not self._opens_with_blank:
            return self._ids(text)
        for anchor in _ANCHORS:
            before, both = self._ids(anchor), self._ids(anchor + text)
            found = both[len(before) :]
            # The anchor must have the same tokens with the text behind it, and no blank may be between them.
            if both[: len(before)] == before and (text[:1] == " " or not self._begins_with_blank(found)):
                return found
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _begins_with_blank(self, ids: Sequence[int]) -> bool:
        return "".join(self._tokenizer.convert_ids_to_tokens(list(ids[:1]))).startswith(BLANK)

    def decode(self, ids: Sequence[int]) -> str:
        decode = self._tokenizer.decode
        return str(decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _in_form(message: Message, empty: str | None, as_text: bool) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    content = message["content"] or empty
    return {**message, "content": content, "tool_calls": calls if as_text else message["tool_calls"]}
