"""Reads the text or the chat messages of a prompt from a row, without a tokenizer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from asyncrl.config.data_section import DataConfig
from asyncrl.data.dataset import Row
from asyncrl.errors import DataError

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

    def read(self, row: Row, where: str) -> str | list[Mapping[str, str]]:
        """Return the text, or, with a chat template, messages. Raises DataError that begins with `where`."""
        value = self._value(row, where)
        if self.chat_template and not isinstance(value, str):
            messages = value if isinstance(value, list) else []
            if not messages or not all(
                isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
            ):
                allowed = "a chat prompt is text or a list of messages with `role` and `content`"
                raise DataError(f"{where}: found `{str(value)[:80]}`; {allowed}")
            _require_unicode(*(str(part) for message in messages for part in message.values()), where=where)
            return messages
        if not isinstance(value, str):
            is_list = isinstance(value, list)
            cure = "set model.chat_template: true for chat messages" if is_list else "write it as text"
            found = "nothing" if value is None else f"a {type(value).__name__}"
            column = f"column `{self.data.prompt_field}`"
            raise DataError(f"{where}: {column} holds {found}; allowed is text; {cure}")
        if not value.strip():
            raise DataError(f"{where}: the prompt is empty; remove the row")
        _require_unicode(value, where=where)
        return value

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


def _require_unicode(*texts: str, where: str) -> None:
    """Raise DataError for half of a surrogate pair: JSON may hold one, but no tokenizer accepts it."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start : error.end].encode("unicode_escape").decode()
            cure = "correct the text or remove the row"
            raise DataError(f"{where}: the prompt holds {half}, half of a character; {cure}") from error
