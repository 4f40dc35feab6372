"""Reads the text or the chat messages of a prompt from a row, without a tokenizer."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, Self

from asyncrl.config.data_section import DataConfig
from asyncrl.data.images import image_sources
from asyncrl.data.row_files import Row
from asyncrl.errors import DataError
from asyncrl.session.chat_messages import Message, is_begun, plain, text_of

MOST_WIDTH = 1000  # of a template's field; with a larger one a prompt would be far longer than its row
# Roles of ShareGPT's messages, which have `from` and `value`.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing"), "assistant"),
    "system": "system",
    **dict.fromkeys(("function", "tool", "observation"), "tool"),
}


class _Template(Formatter):
    """`str.format` with a bound on widths, which may come from the row, as in {column:>{width}}."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Return the value of a field. Raises LookupError without it, and for null, whose text is `None`."""
        try:
            found = super().get_field(field_name, args, kwargs)
        except (LookupError, TypeError) as error:
            if field_name.partition("[")[0] not in kwargs:
                raise
            raise LookupError(f"`{field_name}`, which the row does not have ({error})") from error
        if found[0] is None:
            raise LookupError(f"`{field_name}`, which is null")
        return found

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return the text of a field. Raises ValueError for messages, and a large width or precision."""
        if isinstance(value, list) and any(isinstance(one, dict) and "role" in one for one in value):
            raise ValueError("a column has chat messages, which become no text; name one that has text")
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
    template_key: str = "data.template"  # that messages name

    def for_teacher(self, template: str) -> Self:
        """Return one that reads what a teacher reads, by `algorithm.reference.template`."""
        data = self.data.model_copy(update={"template": template})
        return replace(self, data=data, template_key="algorithm.reference.template")

    def read(self, row: Row, where: str) -> str | list[Message]:
        """Return the text, or, with a chat template, messages in the form of episodes, as `plain` gives it.

        Raises DataError that begins with `where`.
        """
        value = self._value(row, where)
        if (key := self.data.images_key) is not None:
            given = value if isinstance(value, list) else [{"role": "user", "content": value}]
            _require_unicode(json.dumps(given, ensure_ascii=False, default=str), where=where)
            messages = self._with_system(self._messages(given, where, _in_parts))
            return with_images(messages, len(image_sources(row, key, where)), where)
        if self.chat_template and not isinstance(value, str):
            messages = self._messages(value, where)
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

    def _messages(self, value: Any, where: str, form: Callable[[Message], Message] = plain) -> list[Message]:
        messages = value if isinstance(value, list) else []
        if not messages or not all(_has_form(message) for message in messages):
            said = f"found `{str(value)[:80]}`; a chat prompt is text or a list of messages with `role` and "
            said += "`content`, which is text or a list of parts of type `text`; correct the row"
            if strange := next((one["from"] for one in messages if _is_shared(one)), None):
                said = f"found a message from `{str(strange)[:40]}`; allowed are {', '.join(ROLES)}"
                said += "; correct or remove the row"
            raise DataError(f"{where}: {said}")
        try:
            found: list[Message] = [form(message) for message in messages]
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{where}: the messages cannot be used: {error}; correct or remove the row"
            ) from error
        if found[-1]["role"] == "assistant" and not is_begun(found):
            cure = "add the message with the tool's result, or remove the row"
            raise DataError(f"{where}: the prompt ends with a tool call of the assistant; {cure}")
        if is_begun(found) and self.data.last_answer == "take":  # `with_messages` has taken what it can
            cure = "correct the row, or set data.last_answer: continue"
            raise DataError(f"{where}: the prompt is an answer, or ends with two of them; {cure}")
        return found

    def _with_system(self, messages: list[Message]) -> list[Message]:
        system = self.data.system
        if system is None or messages[0]["role"] == "system":
            return messages
        first = {"role": "system", "content": system}
        return [_in_parts(first) if self.data.images_key else first, *messages]

    def _value(self, row: Row, where: str) -> Any:
        template = self.data.template
        try:
            return row[self.data.prompt_field] if template is None else _Template().vformat(template, (), row)
        except KeyError as error:
            wanted = "data.prompt_field" if template is None else self.template_key
            text = f"{wanted} wants column `{error.args[0]}`; the row has {sorted(row)}"
            raise DataError(f"{where}: {text}") from error
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            cure = "write {column}, and {{ for a brace"
            raise DataError(f"{self.template_key} is not a valid template ({error}); {cure}") from error
        except LookupError as error:
            text = f"{self.template_key} wants a value of {error}; correct or remove the row"
            raise DataError(f"{where}: {text}") from error


def with_messages(row: Row, data: DataConfig, taken: Counter[str]) -> Row:
    """Return the row with a prompt of chat messages in OpenAI's form, from which the last answer is taken.

    The answer becomes the column `answer` if it has text, and the row has none. With `data.last_answer:
    continue` it stays. What is no message stays, too: `PromptReader` refuses it. `taken` counts both.
    """
    given = row.get(data.prompt_field)
    if data.template is not None or not isinstance(given, list):
        return row
    messages = [_renamed(message) for message in given]
    found = {**row, data.prompt_field: messages}
    if data.last_answer == "take" and all(map(_has_form, messages)) and is_begun(messages[1:]):
        content, text = messages.pop()["content"], ""
        for part in content if isinstance(content, list) else [content]:
            with contextlib.suppress(ValueError):  # of an image, for example, which is no text
                text += text_of([part])
        taken["rows"] += 1
        if text.strip() and row.get("answer") is None:
            found["answer"] = text
            taken["answers"] += 1
    return found


def taken_answers(taken: Counter[str], rows: int) -> str:
    """Say from how many of so many rows `with_messages` has taken the last answer; empty if from none."""
    if not taken["rows"]:
        return ""
    said = f"the last answer is taken off the prompt of {taken['rows']:,} of {rows:,} rows, and is now "
    return f"{said}the column `answer` of {taken['answers']:,} (data.last_answer)"


def _is_shared(message: Any) -> bool:
    return isinstance(message, dict) and "from" in message and "role" not in message


def _renamed(message: Any) -> Any:
    """Return a message of ShareGPT in OpenAI's form, if its role is known; others as they are."""
    role = ROLES.get(str(message["from"])) if _is_shared(message) else None
    return {"role": role, "content": message.get("value")} if role else message


def _in_parts(message: Message) -> dict[str, Any]:
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
