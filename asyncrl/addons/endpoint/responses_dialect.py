"""OpenAI's Responses: its items are chat messages cut into pieces."""

from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.addons.endpoint import reading
from asyncrl.addons.endpoint.base import Call, Event, Json, Recall, now_s
from asyncrl.addons.endpoint.chat_dialect import ROLES, arguments_text, openai_error, token_logprobs
from asyncrl.addons.endpoint.reading import wrong
from asyncrl.environments.base import Answer, Message

_LOGPROBS = "message.output_text.logprobs"  # in `include`


class ResponsesDialect:
    """`/v1/responses`."""

    keys = reading.keys(
        "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "stream", "include",
        "previous_response_id", "max_tool_calls", "top_logprobs", "truncation",
    )  # fmt: skip

    def read(self, body: Json, recall: Recall) -> Call:
        has_form = (reading.object_of(body, "text").get("format") or {"type": "text"}) != {"type": "text"}
        before: Sequence[Message] = ()
        if previous := body.get("previous_response_id"):
            past = recall(previous)
            before = (*past.call.messages[past.call.openings :], past.message)
        given = body.get("input")
        items = (
            [{"role": "user", "content": given}] if isinstance(given, str) else reading.list_of(body, "input")
        )
        start = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        new = reading.require_messages(_messages([*_resolved(items, recall)]))
        return reading.call_of(
            body,
            choice=body.get("tool_choice") or "auto",
            form="text.format" if has_form else "",
            messages=(*_messages(start), *before, *new),
            tools=reading.tools_of(body, ["function"], "parameters"),
            openings=len(start),
            max_tokens=reading.limit_of(body, "max_output_tokens"),
            logprobs=isinstance(wanted := body.get("include"), list) and _LOGPROBS in wanted,
        )

    def write(self, call: Call, answers: Sequence[Answer], number: str) -> Json:
        """Return the answer as a response with its items."""
        (answer,) = answers
        is_cut = answer.finish_reason != "stop"
        status = "incomplete" if is_cut else "completed"
        output: list[Json] = []
        if answer.text or not answer.tool_calls:
            logprobs = token_logprobs(answer) if call.logprobs else []
            part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": logprobs}
            head = {"type": "message", "id": f"msg_{number}", "status": status, "role": "assistant"}
            output.append({**head, "content": [part]})
        output += [
            {
                "type": "function_call",
                "id": f"fc_{number}{index}",
                "call_id": one.id,
                "name": one.name,
                "arguments": arguments_text(one.arguments),
                "status": "completed",
            }
            for index, one in enumerate(answer.tool_calls)
        ]
        return {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": now_s(),
            "status": status,
            "model": call.model,
            "error": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": None,
            "top_p": None,
            "tool_choice": "auto" if call.calls_tools else "none",
            "tools": [{"type": "function", "strict": False, **one["function"]} for one in call.tools],
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer.tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.tokens,
            },
        }

    def events(self, call: Call, answer: Json) -> Iterator[Event]:
        """Yield the events of a whole response in OpenAI's order."""
        begun = {**answer, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for index, item in enumerate(answer["output"]):
            events += _item_events(item, {"output_index": index})
        events.append((f"response.{answer['status']}", {"response": answer}))
        for number, (name, data) in enumerate(events):
            yield name, {"type": name, "sequence_number": number, **data}

    error = staticmethod(openai_error)


def _resolved(items: Sequence[Json], recall: Recall) -> Iterator[Json]:
    """The items, with those of our answers in the place of references to them."""
    for item in items:
        if item.get("type") != "item_reference":
            yield item
            continue
        output = recall(item.get("id", "")).answer.get("output", ())
        found = [one for one in output if one["id"] == item["id"]]
        if not found:
            raise wrong(f"there is no item {item['id']:.60}; send the item")
        yield found[0]


def _messages(items: Sequence[Json]) -> list[Message]:
    """Chat messages from items: an answer's text and its calls, which are items of their own, are one."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        where, kind = f"input[{index}]", item.get("type", "message")
        if kind == "message":
            role = reading.role_of(item, where, *ROLES)
            messages.append({"role": role, "content": reading.text_in(item.get("content"), where)})
        elif kind == "function_call":
            call = reading.function_call(item.get("call_id"), item.get("name"), item.get("arguments"))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = reading.text_in(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content})
        elif kind != "reasoning":  # the session has the reasoning of its own answers
            raise wrong(
                f"{where}: the type is {kind!r:.40}; allowed are messages, function calls and outputs"
            )
    return list(messages)


def _item_events(item: Json, place: Json) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of an item, which begins empty."""
    is_text = item["type"] == "message"
    empty: Json = {"content": []} if is_text else {"arguments": ""}
    yield "response.output_item.added", {**place, "item": {**item, "status": "in_progress", **empty}}
    inside = {**place, "item_id": item["id"]}
    if is_text:
        (part,) = item["content"]
        inside["content_index"] = 0
        text, logprobs = part["text"], {"logprobs": part["logprobs"]}
        yield "response.content_part.added", {**inside, "part": {**part, "text": ""}}
        if text:
            yield "response.output_text.delta", {**inside, "delta": text, **logprobs}
        yield "response.output_text.done", {**inside, "text": text, **logprobs}
        yield "response.content_part.done", {**inside, "part": part}
    else:
        arguments = item["arguments"]
        yield "response.function_call_arguments.delta", {**inside, "delta": arguments}
        done = {**inside, "arguments": arguments, "name": item["name"]}
        yield "response.function_call_arguments.done", done
    yield "response.output_item.done", {**place, "item": item}
