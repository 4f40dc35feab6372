"""Messages: in which form templates get them, and when two of them are the same."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.errors import as_unicode

Message = Mapping[str, Any]
"""A message or a tool in the form of OpenAI's chat interface."""


def text_of(content: Any) -> str:
    """Return a content's text: "" for None, joined text parts. Raises ValueError for any other part."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        return _json(content)
    texts = []
    for part in content:
        named = part if isinstance(part, dict) else {"text": part}
        text, kind = named.get("text"), str(named.get("type", "text"))
        if not isinstance(text, str) or not kind.endswith("text"):
            found = f"found the content part {_json(part):.80}"
            raise ValueError(f"{found}; only parts of type `text` can be used")
        texts.append(text)
    return "".join(texts)


def calls_of(message: Message) -> list[tuple[str, Any]]:
    """Return name and arguments of each tool call; arguments in JSON text are read."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            allowed = '{"function": {"name": ..., "arguments": ...}}'
            raise ValueError(f"found the tool call {_json(call):.80}; allowed is {allowed}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # Text that is not JSON is compared, and rendered, as it is.
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments) if arguments.strip() else {}
        found.append((function["name"], {} if arguments is None else arguments))
    return found


def keys_of(messages: Sequence[Message], tools: Sequence[Message]) -> Iterator[bytes]:
    """Yield, for 0, 1, ... messages, a digest of the tools and of these messages.

    Messages are the same if they agree in role, text and tool calls (name and arguments). Ids of calls,
    reasoning and blanks around an answer's text are ignored: agent libraries rename, drop or strip them.
    """
    key = _digest(b"", _json(list(tools)))
    yield key
    for message in messages:
        key = key_after(key, message)
        yield key


def key_after(key: bytes, message: Message) -> bytes:
    """Return the key of the conversation that has one message more than that of `key`."""
    text, role = text_of(message.get("content")), message.get("role")
    calls = json.loads(_json(calls_of(message)), parse_float=_number)
    return _digest(key, _json([role, text.strip() if role == "assistant" else text, calls]))


def _number(text: str) -> float:
    """A number of JSON; JavaScript writes 2.0 as 2."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _digest(key: bytes, text: str) -> bytes:
    return hashlib.blake2b(key + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def plain(message: Message) -> dict[str, Any]:
    """Return the message as templates get it: text content, arguments as JSON values, no null keys.

    Raises ValueError for content and calls that have no such form.
    """
    found = {name: value for name, value in message.items() if value is not None}
    found["content"] = text_of(message.get("content"))
    calls = [
        {"id": given.get("id") or "call", "type": "function", "function": {"name": name, "arguments": value}}
        for given, (name, value) in zip(found.pop("tool_calls", ()), calls_of(message), strict=True)
    ]
    if "reasoning" in found:  # vLLM's name of what templates call `reasoning_content`
        found.setdefault("reasoning_content", found.pop("reasoning"))
    return found | ({"tool_calls": calls} if calls else {})


def is_begun(messages: Sequence[Message]) -> bool:
    """Return whether the last message is the beginning of an answer, which the model continues."""
    return bool(messages) and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")


class Breaker:
    """Breaks the texts of special tokens: text of a page or of a tool must not end a turn."""

    def __init__(self, special_texts: frozenset[str]) -> None:
        longest_first = sorted((text for text in special_texts if len(text) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.broken = 0

    def text(self, text: str, *, own: str = "") -> str:
        """Return `text` with a space after the first character of each special token's text.

        Those within the user's `own` text, where the text has it first, are kept. Half of a surrogate pair,
        which JSON can have and no tokenizer accepts, becomes a question mark.
        """
        text = as_unicode(text)
        begin = text.find(own)
        end = begin + len(own) if begin >= 0 else -1

        def broken(match: re.Match[str]) -> str:
            if begin <= match.start() and match.end() <= end:
                return match[0]
            self.broken += 1
            return f"{match[0][0]} {match[0][1:]}"

        return self._pattern.sub(broken, text)

    def value(self, value: Any) -> Any:
        """Return a JSON value in which every text is broken."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(one) for one in value]
        return value

    def message(self, message: Message, *, own: str = "") -> dict[str, Any]:
        """Return the message for templates, broken as by `text`; `own` is in content. Raises as `plain`."""
        found = plain(message)
        content = self.text(found["content"], own=own)
        return {**self.value({**found, "content": ""}), "content": content}
