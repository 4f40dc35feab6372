"""From a row to what its prompt is made of, without a tokenizer: every row can be checked before anything is loaded."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from asyncrl.config.schema import DataConfig
from asyncrl.data.dataset import Row
from asyncrl.errors import DataError

# Largest width or precision in a template: a larger one makes a prompt that is far longer than its row.
MOST_WIDTH = 1000


class _Template(Formatter):
    """`str.format`, with bounds."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """What stands for one field. The row may give the width, as in {column:>{width}}."""
        if wide := [number for number in re.findall(r"\d+", format_spec) if len(number) > 9 or int(number) > MOST_WIDTH]:
            raise ValueError(f"found the width or precision {wide[0]:.40}, at most {MOST_WIDTH} is allowed")
        return str(super().format_field(value, format_spec))


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Takes out of a row what its prompt is made of, and refuses a row without it."""

    data: DataConfig
    chat_template: bool

    def read(self, row: Row, where: str) -> str | list[Mapping[str, str]]:
        """Text, or with a chat template the messages. Raises DataError that begins with `where`."""
        value = self._value(row, where)
        if self.chat_template and not isinstance(value, str):
            messages = _checked_messages(value, where)
            _require_unicode(*(str(part) for message in messages for part in message.values()), where=where)
            return list(messages)
        if not isinstance(value, str):
            cure = "set model.chat_template: true for chat messages" if isinstance(value, list) else "write it as text"
            found = "nothing" if value is None else f"a {type(value).__name__}"
            raise DataError(f"{where}: column `{self.data.prompt_field}` holds {found}; allowed is text; {cure}")
        if not value.strip():
            raise DataError(f"{where}: the prompt is empty; remove the row")
        _require_unicode(value, where=where)
        return value

    def _value(self, row: Row, where: str) -> Any:
        try:
            return row[self.data.prompt_field] if self.data.template is None else _Template().vformat(self.data.template, (), row)
        except KeyError as error:
            wanted = "data.prompt_field" if self.data.template is None else "data.template"
            raise DataError(f"{where}: {wanted} wants column `{error.args[0]}`; the row has {sorted(row)}") from error
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            raise DataError(f"data.template is no valid template ({error}); write {{column}}, and {{{{ for a brace") from error


def _require_unicode(*texts: str, where: str) -> None:
    """JSON may hold half of a character, which no tokenizer takes."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start : error.end].encode("unicode_escape").decode()
            raise DataError(f"{where}: the prompt holds {half}, half of a character; mend the text or remove the row") from error


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
