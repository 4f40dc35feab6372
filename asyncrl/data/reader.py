"""Reads the text or the chat messages of a prompt from a row, without a tokenizer."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from string import Formatter
from typing import Any

from asyncrl.config.data_section import DataConfig
from asyncrl.data.images import image_sources
from asyncrl.data.row_files import Row
from asyncrl.errors import DataError
from asyncrl.session.chat_messages import Message, is_begun, plain, text_of

MOST_WIDTH = 1000  # of a template's field; with a larger one a prompt would be far longer than its row


class _Template(Formatter):
    """`str.format` with a bound on widths, which may come from the row, as in {column:>{width}}."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return the text of a field. Raises ValueError if its width or precision is too large."""
        for number in re.findall(r"\d+", format_spec):
            if len(number) > 9 or int(number) > MOST_WIDTH:
                raise ValueError(
                    f"found the width or precision {number:.40}, at most {MOST_WIDTH} is allowed"
                )
        return str(super().format_field(value, format_spec))


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads the content of a prompt from a row."""

    data: DataConfig
    chat_template: bool

    def read(self, row: Row, where: str) -> str | list[Message]:
        """Return the text, or, with a chat template, messages in the form of episodes, as `plain` gives it.

        Raises DataError that begins with `where`.
        """
        value = self._value(row, where)
        if (key := self.data.images_key) is not None:
            given = value if isinstance(value, list) else [{"role": "user", "content": value}]
            _require_unicode(json.dumps(given, ensure_ascii=False, default=str), where=where)
            messages = self._with_system(_messages(given, where, in_parts))
            return with_images(messages, len(image_sources(row, key, where)), where)
        if self.chat_template and not isinstance(value, str):
            messages = _messages(value, where)
            _require_unicode(json.dumps(messages, ensure_ascii=False, default=str), where=where)
            return self._with_system(messages)
        if not isinstance(value, str):
            is_list = isinstance(value, list)
            cure = "set model.chat_template: true for chat messages" if is_list else "write it as text"
            found = "nothing" if value is None else f"a {type(value).__name__}"
            column = f"column `{self.data.prompt_field}`"
            raise DataError(f"{where}: {column} holds {found}; allowed is text; {cure}")
        if not value.strip():
            raise DataError(f"{where}: the prompt is empty; remove the row")
        _require_unicode(value, where=where)
        return self._with_system([{"role": "user", "content": value}]) if self.chat_template else value

    def _with_system(self, messages: list[Message]) -> list[Message]:
        system = self.data.system
        has_own = system is None or messages[0]["role"] == "system"
        if has_own:
            return messages
        first = {"role": "system", "content": system}
        return [in_parts(first) if self.data.images_key else first, *messages]

    def _value(self, row: Row, where: str) -> Any:
        template = self.data.template
        try:
            return row[self.data.prompt_field] if template is None else _Template().vformat(template, (), row)
        except KeyError as error:
            wanted = "data.prompt_field" if template is None else "data.template"
            text = f"{wanted} wants column `{error.args[0]}`; the row has {sorted(row)}"
            raise DataError(f"{where}: {text}") from error
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            cure = "write {column}, and {{ for a brace"
            raise DataError(f"data.template is not a valid template ({error}); {cure}") from error


def in_parts(message: Message) -> dict[str, Any]:
    """Return the message with its content as parts of type `image` and `text`, as models with images need.

    Raises ValueError for other parts.
    """
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": text_of(content)}]
    found = [
        {"type": "image"}
        if isinstance(part, dict) and part.get("type") == "image"
        else {"type": "text", "text": text_of([part])}
        for part in parts
    ]
    return {**plain({**message, "content": None}), "content": found}


def with_images(messages: list[Message], images: int, where: str) -> list[Message]:
    """Return the messages with a part for each image of the row. Raises DataError if their numbers differ."""
    parts = sum(part["type"] == "image" for message in messages for part in message["content"])
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if images and not parts and first is not None:
        content = [*[{"type": "image"}] * images, *messages[first]["content"]]
        return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]
    if parts != images:
        found = f"found {images} images in the row, and {parts} parts of type `image` in its messages"
        raise DataError(f"{where}: {found}; write one part for each image, or no part")
    return messages


def _messages(value: Any, where: str, form: Callable[[Message], Message] = plain) -> list[Message]:
    messages = value if isinstance(value, list) else []
    if not messages or not all(_has_form(message) for message in messages):
        allowed = "a chat prompt is text or a list of messages with `role` and `content`, which is text"
        is_shared = any(isinstance(one, dict) and {"from", "value"} <= one.keys() for one in messages)
        cure = "rename `from` to `role` and `value` to `content`" if is_shared else "correct the row"
        said = f"found `{str(value)[:80]}`; {allowed} or a list of parts of type `text`"
        raise DataError(f"{where}: {said}; {cure}")
    try:
        found: list[Message] = [form(message) for message in messages]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: the messages cannot be used: {error}; correct or remove the row"
        ) from error
    if found[-1]["role"] == "assistant" and not is_begun(found):
        cure = "add the message with the tool's result, or remove the row"
        raise DataError(f"{where}: the prompt ends with a tool call of the assistant; {cure}")
    return found


def _has_form(message: Any) -> bool:
    """Whether the message has a role, and text as content, or calls instead."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return bool(message.get("tool_calls")) if content is None else isinstance(content, str | list)


def _require_unicode(text: str, *, where: str) -> None:
    """Raise DataError for half of a surrogate pair: JSON may hold one, but no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start : error.end].encode("unicode_escape").decode()
        cure = "correct the text or remove the row"
        raise DataError(f"{where}: the prompt holds {half}, half of a character; {cure}") from error
