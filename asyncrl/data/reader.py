"""Reads the text or the messages of a prompt from a row, without a tokenizer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import Row
from asyncrl.errors import DataError

# Largest width or precision in a template: with a larger one a prompt would be far longer than its row.
MOST_WIDTH = 1000


class _Template(Formatter):
    """`str.format` with a bound on widths, which may come from the row as in {column:>{width}}."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """The text of one field. Raises ValueError if its width or precision is too large."""
        if wide := [
            number
            for number in re.findall(r"\d+", format_spec)
            if len(number) > 9 or int(number) > MOST_WIDTH
        ]:
            raise ValueError(f"found the width or precision {wide[0]:.40}, at most {MOST_WIDTH} is allowed")
        return str(super().format_field(value, format_spec))


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads the content of a prompt from a row, and refuses a row that lacks it."""

    data: DataConfig
    chat_template: bool

    def read(self, row: Row, where: str) -> str | list[Mapping[str, str]]:
        """The text, or, with a chat template, the messages. Raises DataError that begins with `where`."""
        value = self._value(row, where)
        if self.chat_template and not isinstance(value, str):
            if not (
                value
                and isinstance(value, list)
                and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
            ):
                raise DataError(
                    f"{where}: found `{str(value)[:80]}`; a chat prompt is text or a list of messages with "
                    "`role` and `content`"
                )
            _require_unicode(*(str(part) for message in value for part in message.values()), where=where)
            return value
        if not isinstance(value, str):
            cure = (
                "set model.chat_template: true for chat messages"
                if isinstance(value, list)
                else "write it as text"
            )
            found = "nothing" if value is None else f"a {type(value).__name__}"
            raise DataError(
                f"{where}: column `{self.data.prompt_field}` holds {found}; allowed is text; {cure}"
            )
        if not value.strip():
            raise DataError(f"{where}: the prompt is empty; remove the row")
        _require_unicode(value, where=where)
        return value

    def _value(self, row: Row, where: str) -> Any:
        try:
            return (
                row[self.data.prompt_field]
                if self.data.template is None
                else _Template().vformat(self.data.template, (), row)
            )
        except KeyError as error:
            wanted = "data.prompt_field" if self.data.template is None else "data.template"
            raise DataError(
                f"{where}: {wanted} wants column `{error.args[0]}`; the row has {sorted(row)}"
            ) from error
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            raise DataError(
                f"data.template is not a valid template ({error}); write {{column}}, and {{{{ for a brace"
            ) from error


def _require_unicode(*texts: str, where: str) -> None:
    """Raise DataError for half of a surrogate pair: JSON may hold one, but no tokenizer accepts it."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start : error.end].encode("unicode_escape").decode()
            raise DataError(
                f"{where}: the prompt holds {half}, half of a character; correct the text or remove the row"
            ) from error
