"""vLLM's parsers of tool calls and of reasoning: they need no engine, and import vLLM only for a parser."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from asyncrl.environments.base import Message
from asyncrl.errors import ConfigError
from asyncrl.session.base import Parse, Parsed, Split


def parse_with(tokenizer: Any, name: str) -> Parse:
    """Return a function that parses with vLLM's parser `name`.

    Raises ConfigError if there is no such parser, or it cannot be used with the tokenizer.
    """
    from vllm.tool_parsers import ToolParserManager

    names = (*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers)
    _require("model.tool_parser", name, names)
    kind = ToolParserManager.get_tool_parser(name)
    # Some are stubs, which fail at every answer.
    _tried("model.tool_parser", name, lambda: kind(tokenizer).extract_tool_calls("x", _request()))
    # It logs a traceback for each call that is not one, and a policy in training writes many of these.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)

    def parse(text: str, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Message]) -> Parsed:
        if not tools:
            return Parsed(text)
        request = _request(tools)
        found = kind(tokenizer, request.tools).extract_tool_calls(text, request)
        if not found.tools_called:
            return Parsed(text)
        calls = tuple((one.function.name, one.function.arguments) for one in found.tool_calls)
        return Parsed(found.content or "", calls=calls)

    return parse


def split_with(tokenizer: Any, name: str) -> Split:
    """Return a function that takes reasoning out of an answer, as vLLM's parser `name` marks it.

    Some of vLLM's parsers end the reasoning where a call begins inside of it. Here it ends at its end mark,
    because a call that the model only thinks about must not be made.

    Raises ConfigError if there is no such parser, or it cannot be used with the tokenizer.
    """
    from vllm.reasoning import ReasoningParserManager

    _require("model.reasoning_parser", name, ReasoningParserManager.list_registered())
    kind = ReasoningParserManager.get_reasoning_parser(name)
    parser = _tried("model.reasoning_parser", name, lambda: kind(tokenizer))
    begin = parser.reasoning_start_str or getattr(parser, "start_token", None)
    end = parser.reasoning_end_str or getattr(parser, "end_token", None)
    if not begin or not end:
        request = _request()

        def by_parser(text: str, opening: str) -> tuple[str, str]:
            reasoning, content = kind(tokenizer).extract_reasoning(text, request)
            return reasoning or "", content or ""

        _tried("model.reasoning_parser", name, lambda: by_parser("x", ""))
        return by_parser

    def split(text: str, opening: str) -> tuple[str, str]:
        before, is_marked, rest = text.partition(begin)
        if not is_marked or end in before:
            # The prompt may have opened it, or a model may leave out its beginning.
            is_open = begin in opening and end not in opening.rpartition(begin)[2]
            if not is_open and end not in text:
                return "", text
            before, rest = "", text
        reasoning, _, content = rest.partition(end)
        return reasoning, before + content

    return split


def _require(key: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise ConfigError(f"{key}: vLLM has no parser `{name}`; it has {', '.join(sorted(set(names)))}")


def _tried(key: str, name: str, attempt: Callable[[], Any]) -> Any:
    try:
        return attempt()
    except Exception as error:
        text = f"{key}: {name} cannot be used on text of this tokenizer ({error}); name another parser"
        raise ConfigError(text) from error


def _request(tools: Sequence[Message] = ()) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked = {"model": "policy", "messages": [{"role": "user", "content": ""}], "tools": list(tools) or None}
    return ChatCompletionRequest.model_validate(asked)
