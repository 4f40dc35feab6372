"""Reads the answer that an agent gets from sampled ids: text, reasoning and tool calls.

Parsing shapes what the agent reads, not trained ids. An unparsable call stays in the text and is counted.
vLLM is imported only for its parsers of tool calls and of reasoning, which need no engine.
"""

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from typing import Any

from asyncrl.environments.base import Answer, Message, ToolCall
from asyncrl.errors import ConfigError, RenderError
from asyncrl.session.base import Parse, Parsed, Split, without_stop
from asyncrl.session.chat_template import PROBE, TemplateRenderer
from asyncrl.types import Rollout

_OPENING = 32  # tokens at the end of a prompt, in which a template may open the reasoning


class AnswerReader:
    """Reads answers with the tokenizer's own response template if it has one, else with vLLM's parsers."""

    def __init__(
        self,
        tokenizer: Any,
        renderer: TemplateRenderer,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """Take the names of vLLM's parsers, which are not needed for a tokenizer with a response template.

        Raises ConfigError if vLLM has no parser of this name or cannot use it with the tokenizer.
        """
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._parse: Parse | None = None
        self._split: Split | None = None
        if getattr(tokenizer, "response_template", None):
            self._parse = partial(_by_template, tokenizer)
        else:
            self._parse = None if tool_parser is None else parse_with(tokenizer, tool_parser)
            self._split = split_with(tokenizer, reasoning_parser) if reasoning_parser else None
        self._opener = _opener(renderer) if self._parse else ""

    def require_tools(self, tools: Sequence[Message]) -> None:
        """Raise ConfigError if the model would not see these tools, or its calls could not be parsed."""
        self._require_calls()
        shown = self._renderer.render([{"role": "user", "content": ""}], tools, generation=True)
        if hidden := [name for tool in tools if (name := tool["function"]["name"]) not in shown]:
            raise ConfigError(
                f"model.path: the chat template does not show the tools {', '.join(hidden)} to the model; "
                "name one that does in model.chat_template, or take another model"
            )

    def _require_calls(self) -> None:
        if self._parse is None:
            raise ConfigError(
                "model.tool_parser: there are tools, but nothing parses the model's calls, because the "
                "tokenizer has no response_template; name one of vLLM's tool parsers, such as hermes"
            )

    def read(self, prompt_ids: Sequence[int], rollout: Rollout, tools: Sequence[Message] = ()) -> Answer:
        """Return the answer; without `tools` a call is text. Raises ConfigError if tools have no parser."""
        if tools:
            self._require_calls()
        ids = without_stop(self._renderer, rollout.response_ids.tolist())
        parsed = self._parsed(ids, prompt_ids, tools)

        def logprobs() -> list[tuple[str, float]]:
            texts = [self._renderer.decode([one]) for one in ids]
            return list(zip(texts, rollout.behaviour_logprobs.tolist(), strict=False))

        first = int.from_bytes(blake2b(repr((prompt_ids, ids)).encode(), digest_size=8).digest())
        calls = tuple(
            # Nine letters and digits, because some templates refuse other ids.
            ToolCall(id=f"{(first + index) % 16**9:09x}", name=name, arguments=_arguments(arguments))
            for index, (name, arguments) in enumerate(parsed.calls)
        )
        return Answer(
            text=self._without_specials(parsed.text),
            tool_calls=calls,
            finish_reason=rollout.finish_reason,
            tokens=len(rollout.response_ids),
            prompt_tokens=len(prompt_ids),
            reasoning=self._without_specials(parsed.reasoning),
            logprobs=logprobs,
            is_unparsed=bool(tools and not calls and self._opener and self._opener in parsed.text),
        )

    def _parsed(self, ids: list[int], prompt_ids: Sequence[int], tools: Sequence[Message]) -> Parsed:
        text, reasoning = self._renderer.decode(ids), ""
        if self._split is not None:  # first, because a call in the reasoning is none
            reasoning, text = self._split(text, self._renderer.decode(prompt_ids[-_OPENING:]))
        parsed = Parsed(text)
        if self._parse is not None:
            # What is not a call, although it begins like one, is read as it is.
            with suppress(Exception):
                parsed = self._parse(text, ids, prompt_ids, tools)
        parsed = parsed if tools or not parsed.calls else Parsed(text)
        return parsed._replace(reasoning=parsed.reasoning or reasoning)

    def _without_specials(self, text: str) -> str:
        for special in self._renderer.special_texts:
            text = text.replace(special, "")
        return text


def parse_with(tokenizer: Any, name: str) -> Parse:
    """Return a function that parses with vLLM's parser `name`.

    Raises ConfigError if there is no such parser, or it cannot be used with the tokenizer.
    """
    from vllm.tool_parsers import ToolParserManager

    names = {**ToolParserManager.tool_parsers, **ToolParserManager.lazy_parsers}
    with _usable("model.tool_parser", name, names):
        kind = ToolParserManager.get_tool_parser(name)
        # Some are stubs, which fail at every answer.
        kind(tokenizer).extract_tool_calls("x", _request())
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

    request = _request()

    def by_parser(text: str, opening: str) -> tuple[str, str]:
        reasoning, content = kind(tokenizer).extract_reasoning(text, request)
        return reasoning or "", content or ""

    with _usable("model.reasoning_parser", name, ReasoningParserManager.list_registered()):
        kind = ReasoningParserManager.get_reasoning_parser(name)
        parser = kind(tokenizer)
        begin = parser.reasoning_start_str or getattr(parser, "start_token", None)
        end = parser.reasoning_end_str or getattr(parser, "end_token", None)
        if not begin or not end:
            by_parser("x", "")
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


@contextmanager
def _usable(key: str, name: str, names: Collection[str]) -> Iterator[None]:
    """Raise ConfigError if there is no parser `name`, or it fails in the body, which tries it."""
    if name not in names:
        raise ConfigError(f"{key}: vLLM has no parser `{name}`; it has {', '.join(sorted(set(names)))}")
    try:
        yield
    except Exception as error:
        text = f"{key}: {name} cannot be used on text of this tokenizer ({error}); name another parser"
        raise ConfigError(text) from error


def _request(tools: Sequence[Message] = ()) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked = {"model": "policy", "messages": [{"role": "user", "content": ""}], "tools": list(tools) or None}
    return ChatCompletionRequest.model_validate(asked)


def _by_template(
    tokenizer: Any, text: str, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Message]
) -> Parsed:
    message: Mapping[str, Any] = tokenizer.parse_response(
        text, prefix=tokenizer.decode(list(prompt_ids)), tools=list(tools) or None
    )
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return Parsed(
        text=message.get("content") or "",
        reasoning=message.get("reasoning_content") or message.get("thinking") or "",
        calls=tuple((str(one["name"]), one.get("arguments", {})) for one in functions),
    )


def _arguments(value: Any) -> Mapping[str, Any] | str:
    text = value if isinstance(value, str) else json.dumps(value)
    with suppress(ValueError, RecursionError):
        read = json.loads(text)
        # Python reads NaN and 1e999, but strict clients refuse an answer with what it writes for them.
        json.dumps(read, allow_nan=False)
        return read if isinstance(read, dict) else text
    return text


def _opener(renderer: TemplateRenderer) -> str:
    """The text with which the template opens a call, up to the first blank; "" if it writes no calls.

    It is where the probe's answer with a call and one with text become different.
    """
    question, answer = PROBE
    try:
        call = renderer.render(PROBE, generation=False)
        plain = {"role": "assistant", "content": "\x00"}
        text = renderer.render([question, plain], generation=False)
    except RenderError:
        return ""
    name = answer["tool_calls"][0]["function"]["name"]
    before = call.partition(name)[0] if name in call else ""
    differs = (place for place, (one, other) in enumerate(zip(before, text, strict=False)) if one != other)
    return "".join(before[next(differs, len(before)) :].split()[:1])
