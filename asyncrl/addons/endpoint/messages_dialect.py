"""Anthropic's Messages."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.addons.endpoint import reading
from asyncrl.addons.endpoint.base import Call, Event, Json, Recall, Refused
from asyncrl.addons.endpoint.reading import wrong
from asyncrl.environments.base import Answer, Message

UNPARSED = "unparsed"
_ENDS = {"stop": "end_turn", "length": "max_tokens"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class MessagesDialect:
    """`/v1/messages`."""

    keys = reading.keys(
        "messages", "system", "tools", "tool_choice", "output_config", "output_format", "max_tokens",
        "stop_sequences", "stream", "thread", "thinking", "cache_control", "diagnostics", "inference_geo",
        "speed", "user_profile_id", "workspace_id", "billing_policy",
    )  # fmt: skip

    def read(self, body: Json, recall: Recall) -> Call:
        has_form = body.get("output_format") or reading.object_of(body, "output_config").get("format")
        thread = reading.object_of(body, "thread")
        kind = thread.get("type", "create")
        if kind not in ("create", "continue"):
            raise wrong(f"`thread` is of type {kind!r:.40}; allowed are create and continue")
        # The client sends only what is new behind the message that it continues.
        past = recall(thread.get("previous_message_id", "")) if kind == "continue" else None
        tools = reading.tools_of(body, ["custom", "", None], "input_schema")
        if past and (tools or body.get("system")):
            raise wrong(
                "`thread` continues a conversation, which has its `system` and `tools`; leave them out"
            )
        system = reading.text_in(body.get("system"), "system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for index, message in enumerate(reading.list_of(body, "messages")):
            messages += _messages(message, f"messages[{index}]")
        before = (*past.call.messages, past.message) if past else ()
        return reading.call_of(
            body,
            choice=reading.object_of(body, "tool_choice").get("type", "auto"),
            form="output_config" if has_form else "",
            messages=(*before, *reading.require_messages(messages)),
            tools=past.call.tools if past else tools,
            max_tokens=reading.limit_of(body, "max_tokens"),
            stop=reading.stops_of(body, "stop_sequences"),
        )

    def write(self, call: Call, answers: Sequence[Answer], number: str) -> Json:
        """Return the answer as a message with its blocks."""
        (answer,) = answers
        content: list[Json] = []
        if answer.text or not answer.tool_calls:
            content.append({"type": "text", "text": answer.text})
        content += [
            {
                "type": "tool_use",
                "id": one.id,
                "name": one.name,
                # The model may have written something that is not an object; `_messages` takes it back.
                "input": {UNPARSED: one.arguments} if isinstance(one.arguments, str) else one.arguments,
            }
            for one in answer.tool_calls
        ]
        reason = _ENDS.get(answer.finish_reason, "max_tokens")
        reason = "stop_sequence" if answer.stop else "tool_use" if answer.tool_calls else reason
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": answer.stop or None,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens},
        }

    def events(self, call: Call, answer: Json) -> Iterator[Event]:
        """Yield the events of a whole message in Anthropic's order."""
        usage = {**answer["usage"], "output_tokens": 0}
        begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(answer["content"]):
            if block["type"] == "text":
                empty: Json = {**block, "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            else:
                empty = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events += [
                {"type": "content_block_start", "index": index, "content_block": empty},
                {"type": "content_block_delta", "index": index, "delta": delta},
                {"type": "content_block_stop", "index": index},
            ]
        end = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
        spent = {"output_tokens": answer["usage"]["output_tokens"]}
        events.append({"type": "message_delta", "delta": end, "usage": spent})
        events.append({"type": "message_stop"})
        for event in events:
            yield event["type"], event

    def error(self, refused: Refused) -> Json:
        """Return the refusal; agents know an overflow by the beginning of its text."""
        text = str(refused)
        if refused.code == "context_length_exceeded":
            text = f"prompt is too long: {text}"
        server = "api_error" if refused.status >= 500 else "invalid_request_error"
        return {"type": "error", "error": {"type": _ERRORS.get(refused.status, server), "message": text}}


def _messages(message: Json, where: str) -> list[Message]:
    """The chat messages of one message: the results of tools are messages of their own, before its text."""
    role, content = reading.role_of(message, where, "user", "assistant", "system"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": reading.text_in(content, where)}]
    results: list[Message] = []
    calls: list[Message] = []
    parts: list[Any] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            text = reading.text_in(block.get("content"), where)
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text})
        elif kind == "tool_use" and role == "assistant":
            given = block.get("input")
            if isinstance(given, dict) and given.keys() == {UNPARSED}:
                given = given[UNPARSED]
            calls.append(reading.function_call(block.get("id"), block.get("name"), given))
        elif kind not in ("thinking", "redacted_thinking"):
            parts.append(block)
    text = reading.text_in(parts, where)
    if calls:
        return [{"role": role, "content": text, "tool_calls": calls}]
    return [*results, {"role": role, "content": text}] if parts or not results else results
