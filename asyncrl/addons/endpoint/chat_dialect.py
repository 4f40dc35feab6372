"""OpenAI's Chat Completions and Completions."""

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from asyncrl.addons.endpoint import reading
from asyncrl.addons.endpoint.base import Call, Event, Json, Recall, Refused, now_s
from asyncrl.addons.endpoint.reading import wrong
from asyncrl.environments.base import Answer, Message

ROLES = ("system", "developer", "user", "assistant")
DONE: Event = ("", "[DONE]")


def openai_error(refused: Refused) -> Json:
    """Return a refusal as OpenAI's interfaces write it."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "code": refused.code, "param": None}}


class ChatDialect:
    """`/v1/chat/completions`."""

    keys = reading.keys(
        "messages", "tools", "tool_choice", "response_format", "max_tokens", "max_completion_tokens", "n",
        "stop", "stream", "logprobs", "top_logprobs", "modalities", "prediction",
    )  # fmt: skip

    def read(self, body: Json, recall: Recall) -> Call:
        has_form = (body.get("response_format") or {"type": "text"}) != {"type": "text"}
        tools = [reading.object_of(tool, "function") for tool in reading.list_of(body, "tools")]
        return reading.call_of(
            body,
            choice=body.get("tool_choice") or "auto",
            form="response_format" if has_form else "",
            messages=reading.require_messages(
                [_message(one, f"messages[{i}]") for i, one in enumerate(reading.list_of(body, "messages"))]
            ),
            tools=tuple(reading.function_tool(one) for one in tools),
            max_tokens=reading.limit_of(body, "max_tokens", "max_completion_tokens"),
            stop=reading.stops_of(body, "stop"),
            choices=reading.choices_of(body),
            logprobs=reading.flag(body, "logprobs"),
            streams_usage=reading.flag(reading.object_of(body, "stream_options"), "include_usage"),
        )

    def write(self, call: Call, answers: Sequence[Answer], number: str) -> Json:
        """Return the answer as a completion with one choice per answer."""
        choices: list[dict[str, Any]] = []
        for index, answer in enumerate(answers):
            message = {**answer.message, "content": answer.text or (None if answer.tool_calls else "")}
            for one in message.get("tool_calls", ()):
                one["function"]["arguments"] = arguments_text(one["function"]["arguments"])
            choice = {
                "index": index,
                "message": message,
                "finish_reason": "tool_calls" if answer.tool_calls else answer.finish_reason,
                "logprobs": {"content": token_logprobs(answer), "refusal": None} if call.logprobs else None,
            }
            choices.append(choice)
        return _completion(call, answers, "chat.completion", f"chatcmpl-{number}", choices)

    def events(self, call: Call, answer: Json) -> Iterator[Event]:
        """Yield chunks: each answer, why it ended, and the usage if it is wanted."""
        head = {**answer, "object": "chat.completion.chunk"}
        usage = head.pop("usage")
        for choice in answer["choices"]:
            delta = dict(choice["message"])
            if calls := delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": index, **one} for index, one in enumerate(calls)]
            said = {"delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
            ends = {"delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
            for part in (said, ends):
                yield "", {**head, "choices": [{"index": choice["index"], **part}]}
        if call.streams_usage:
            yield "", {**head, "choices": [], "usage": usage}
        yield DONE

    error = staticmethod(openai_error)


class CompletionsDialect(ChatDialect):
    """`/v1/completions`."""

    keys = reading.keys("prompt", "max_tokens", "n", "stop", "stream", "logprobs")

    def read(self, body: Json, recall: Recall) -> Call:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if not isinstance(prompt, str):
            raise wrong("`prompt` must be one text")
        if reading.choices_of(body) > 1:
            text = (
                "the next prompt would continue only one of them; call once for each, or use chat completions"
            )
            raise wrong(f"`n` is {body['n']}, and plain text has one answer: {text}")
        return reading.call_of(
            body,
            prompt=prompt,
            max_tokens=reading.limit_of(body, "max_tokens"),
            stop=reading.stops_of(body, "stop"),
            logprobs=str(body.get("logprobs")) not in ("None", "False"),
            streams_usage=reading.flag(reading.object_of(body, "stream_options"), "include_usage"),
        )

    def write(self, call: Call, answers: Sequence[Answer], number: str) -> Json:
        """Return the answer as a completion."""
        (one,) = answers  # `read` refuses to make more
        choice: dict[str, Any] = {
            "index": 0,
            "text": one.text,
            "finish_reason": one.finish_reason,
            "logprobs": None,
        }
        if call.logprobs:
            texts = [text for text, _ in one.logprobs()]
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": [value for _, value in one.logprobs()],
                "top_logprobs": None,
                "text_offset": list(accumulate(map(len, texts[:-1]), initial=0))[: len(texts)],
            }
        return _completion(call, answers, "text_completion", f"cmpl-{number}", [choice])

    def events(self, call: Call, answer: Json) -> Iterator[Event]:
        """Yield the answer as one chunk, and the usage if it is wanted."""
        head = dict(answer)
        usage = head.pop("usage")
        yield "", head
        if call.streams_usage:
            yield "", {**head, "choices": [], "usage": usage}
        yield DONE


def token_logprobs(answer: Answer) -> list[Json]:
    """Return the sampled tokens with their log-probabilities; those of other tokens are not known."""
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in answer.logprobs()
    ]


def _completion(
    call: Call, answers: Sequence[Answer], kind: str, number: str, choices: list[dict[str, Any]]
) -> Json:
    given, sampled = answers[0].prompt_tokens, sum(answer.tokens for answer in answers)
    usage = {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}
    head = {"id": number, "object": kind, "created": now_s(), "model": call.model}
    return {**head, "choices": choices, "usage": usage}


def _message(message: Json, where: str) -> Message:
    role = reading.role_of(message, where, *ROLES, "tool")
    if held := [name for name in ("audio", "function_call") if message.get(name)]:
        raise wrong(f"{where}: `{held[0]}` is not served; send text, and `tool_calls`")
    read: dict[str, Any] = {"role": role, "content": reading.text_in(message.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    if calls := reading.list_of(message, "tool_calls"):
        if role != "assistant" or not all(isinstance(one.get("function"), dict) for one in calls):
            raise wrong(f"{where}: only an assistant has `tool_calls`, and each has a `function`")
        read["tool_calls"] = [
            reading.function_call(
                one.get("id"), one["function"].get("name"), one["function"].get("arguments")
            )
            for one in calls
        ]
    return read


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a call as JSON text, or the text that is not JSON."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
