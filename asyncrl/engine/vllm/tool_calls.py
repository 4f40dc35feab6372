"""vLLM's parsers of tool calls."""

import logging
from collections.abc import Sequence
from typing import Any

from asyncrl.environments.base import Message
from asyncrl.errors import ConfigError
from asyncrl.session.base import Parse, Parsed


def parse_with(tokenizer: Any, name: str) -> Parse:
    """Return a function that parses with vLLM's parser `name`.

    Raises ConfigError if there is no such parser, or it cannot be used with the tokenizer.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    names = sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
    if name not in names:
        raise ConfigError(f"model.tool_parser: vLLM has no parser `{name}`; it has {', '.join(names)}")
    kind = ToolParserManager.get_tool_parser(name)
    try:
        kind(tokenizer)
    except Exception as error:
        text = f"model.tool_parser: {name} cannot be used with this tokenizer ({error}); name another parser"
        raise ConfigError(text) from error
    # It logs a traceback for each call that is not one, and a policy in training writes many of these.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)

    def parse(text: str, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Message]) -> Parsed:
        if not tools:
            return Parsed(text)
        request = ChatCompletionRequest.model_validate(
            {"model": "policy", "messages": [{"role": "user", "content": ""}], "tools": list(tools)}
        )
        found = kind(tokenizer, request.tools).extract_tool_calls(text, request)
        if not found.tools_called:
            return Parsed(text)
        calls = tuple((one.function.name, one.function.arguments) for one in found.tool_calls)
        return Parsed(found.content or "", calls=calls)

    return parse
