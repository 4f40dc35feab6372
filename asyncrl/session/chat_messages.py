"""Messages: in which form templates get them, and when two of them are the same."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.errors import as_unicode
from asyncrl.session.base import Message


def text_of(content: Any) -> str:
    """Return the text of a message's content: None is "", and text parts are joined.

    A part that is not text keeps its JSON, so that two different images are not the same.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part(part) for part in content)
    return _json(content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else _json(part)


def calls_of(message: Message) -> list[tuple[str, Any]]:
    """Return name and arguments of each tool call; arguments in JSON text are read."""
    return [_call(call) for call in message.get("tool_calls") or ()]


def _call(call: Message) -> tuple[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(
            ValueError, RecursionError
        ):  # text that is not JSON is compared, and rendered, as it is
            arguments = json.loads(arguments) if arguments.strip() else {}
    return str(function.get("name", "")), {} if arguments is None else arguments


def keys_of(messages: Sequence[Message], tools: Sequence[Message]) -> Iterator[bytes]:
    """Yield, for 0, 1, ... messages, a digest of the tools and of these messages.

    Two messages are the same if they agree in role, text and tool calls (name and arguments). Ids of calls
    and reasoning are ignored, because agent libraries rename or drop them. Blanks around an answer's text
    are ignored, because some of them strip it.
    """
    key = _digest(b"", _json(list(tools)))
    yield key
    for message in messages:
        key = key_after(key, message)
        yield key


def key_after(key: bytes, message: Message) -> bytes:
    """Return the key of the conversation that has one message more than that of `key`."""
    text, role = text_of(message.get("content")), message.get("role")
    return _digest(key, _json([role, text.strip() if role == "assistant" else text, calls_of(message)]))


def _digest(key: bytes, text: str) -> bytes:
    return hashlib.blake2b(key + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


class Breaker:
    """Breaks the texts of special tokens: text of a page or of a tool must not end a turn."""

    def __init__(self, special_texts: frozenset[str]) -> None:
        longest_first = sorted((text for text in special_texts if len(text) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.broken = 0

    def text(self, text: str) -> str:
        """Return `text` with a space after the first character of each special token's text.

        Half of a surrogate pair, which JSON can have and no tokenizer accepts, becomes a question mark.
        """
        broken, count = self._pattern.subn(lambda match: f"{match[0][0]} {match[0][1:]}", as_unicode(text))
        self.broken += count
        return broken

    def value(self, value: Any) -> Any:
        """Return a JSON value in which every text is broken."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(one) for one in value]
        return value

    def message(self, message: Message) -> dict[str, Any]:
        """Return the message as templates get it: text content, arguments as JSON values, all broken."""
        plain = {name: value for name, value in message.items() if value is not None}
        plain["content"] = text_of(message.get("content"))
        calls = [
            {
                "id": given.get("id") or "call",
                "type": "function",
                "function": {"name": name, "arguments": value},
            }
            for given, (name, value) in zip(plain.pop("tool_calls", ()), calls_of(message), strict=True)
        ]
        if "reasoning" in plain:  # vLLM's name of what templates call `reasoning_content`
            plain.setdefault("reasoning_content", plain.pop("reasoning"))
        return dict(self.value(plain | ({"tool_calls": calls} if calls else {})))
