"""Checks of what agents send; every mistake is refused with a text that says what is allowed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.addons.endpoint.base import Call, Json, Refused
from asyncrl.environments.base import Message

# Parameters of any dialect that would change the distribution which is sampled from.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "logit_bias", "best_of",
)  # fmt: skip
# Parameters of any dialect that change neither the conversation nor what is sampled.
_HARMLESS = (
    "metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "parallel_tool_calls", "stream_options", "reasoning",
    "reasoning_effort", "verbosity",
)  # fmt: skip
MOST_CHOICES = 16
MOST_STOPS, LONGEST_STOP = 16, 256  # texts, and characters of one
CONSTRAINED = "constrained_decoding"  # the code of that refusal
_TEXT_PARTS = ("text", "input_text", "output_text")


def wrong(text: str, code: str = "invalid_request") -> Refused:
    """Return the refusal of a malformed call."""
    return Refused(400, text, code)


def keys(*served: str) -> frozenset[str]:
    """Return the names of the parameters that a dialect reads, with those that may be ignored."""
    return frozenset((*served, "model", *SAMPLING, *_HARMLESS))


def body_of(data: bytes, known: frozenset[str]) -> Json:
    """Return a call as JSON. Any other parameter may bring context that the model would not read.

    The call may have half of a surrogate pair, as the model's arguments may: see `Breaker`.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise wrong(f"the body is not JSON that can be used: {error}") from error
    if not isinstance(body, dict):
        raise wrong("the body must be a JSON object")
    if unknown := [name for name, value in body.items() if value and name not in known]:
        text = (
            f"{', '.join(f'`{name:.40}`' for name in unknown[:8])}: this endpoint does not know the parameter"
        )
        raise wrong(f"{text}, which may change what the model reads; leave it out", "unknown_parameter")
    return body


def constrained(names: Sequence[str]) -> Refused:
    """Return the refusal of a call that would constrain what the model may sample."""
    what = " and ".join(f"`{name}`" for name in names)
    text = (
        f"{what} constrains what the model may sample, and training needs its own distribution; leave it out"
    )
    text += ", ask for the form in the prompt, or set `environment.constraints: ignore`"
    return wrong(text, CONSTRAINED)


def call_of(body: Json, *, choice: Any = "auto", form: str = "", **fields: Any) -> Call:
    """Return a call: its own `fields`, and what every dialect writes alike.

    `choice` is the use of tools that is asked for, and `form` the parameter that asks for a form, if any.
    """
    is_forced = choice not in ("auto", "none")
    return Call(
        model=str(body.get("model") or "policy"),  # any is allowed, because there is one
        calls_tools=choice != "none",
        constraints=(form,) * bool(form) + ("tool_choice",) * is_forced,
        streams=flag(body, "stream"),
        overridden=tuple(name for name in SAMPLING if body.get(name) is not None),
        **fields,
    )


def role_of(message: Json, where: str, *allowed: str) -> str:
    """Return the role of a message; templates know no developers."""
    role = message.get("role")
    if role not in allowed:
        raise wrong(f"{where}: the role is {role!r:.40}; allowed are {', '.join(allowed)}")
    return "system" if role == "developer" else str(role)


def flag(body: Json, name: str) -> bool:
    """Return a parameter that is true or false, and false if it is missing."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(f"`{name}` is {value!r:.40}; it must be true or false")
    return bool(value)


def limit_of(body: Json, *names: str) -> int | None:
    """Return the smallest of these limits of tokens, None if there is none."""
    limits = [value for name in names if (value := body.get(name)) is not None]
    for value in limits:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise wrong(f"{' or '.join(names)} is {value!r:.40}; it must be a whole number of at least 1")
    return min(limits, default=None)


def stops_of(body: Json, name: str) -> tuple[str, ...]:
    """Return the texts that end the answer."""
    given = body.get(name)
    texts = [given] if isinstance(given, str) else ([] if given is None else given)
    if (
        not isinstance(texts, list)
        or len(texts) > MOST_STOPS
        or not all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in texts)
    ):
        allowed = f"at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters"
        raise wrong(f"`{name}` is {given!r:.40}; allowed are {allowed}")
    return tuple(texts)


def choices_of(body: Json) -> int:
    """Return the number of answers."""
    count = body.get("n")
    if count is None:
        return 1
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_CHOICES:
        raise wrong(f"`n` is {count!r:.40}; it must be from 1 to {MOST_CHOICES}")
    return count


def object_of(body: Json, name: str) -> Json:
    """Return an object, empty if it is missing."""
    value = body.get(name)
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise wrong(f"`{name}` must be an object")
    return value


def list_of(body: Json, name: str) -> list[Json]:
    """Return a list of objects, empty if it is missing."""
    value = body.get(name)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise wrong(f"`{name}` must be a list of objects")
    return value


def text_in(content: Any, where: str) -> str:
    """Return text, or the joined text parts of a list; None is "". Other parts are refused."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(f"{where}: content is of type {type(content).__name__}; it must be text or text parts")
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            found = f"{where}: a content part is of type {kind!r:.40} or has no `text`"
            raise wrong(f"{found}; this model reads text only")
    return "".join(part["text"] for part in content)


def function_tool(tool: Json, schema: str = "parameters") -> Message:
    """Return a tool in the form that chat templates take; its `schema` has the parameters."""
    name, parameters = tool.get("name"), tool.get(schema)
    if not isinstance(name, str) or not name:
        raise wrong("a tool has no name; each needs one, and JSON schema for its parameters")
    if not isinstance(parameters or {}, Mapping):
        raise wrong(f"tool {name}: the parameters must be a JSON schema")
    function = {
        "name": name,
        "description": str(tool.get("description") or ""),
        "parameters": dict(parameters or {"type": "object", "properties": {}}),
    }
    return {"type": "function", "function": function}


def tools_of(body: Json, kinds: Sequence[str | None], schema: str) -> tuple[Message, ...]:
    """Return the tools. Those of other kinds run on the servers of the interface's maker, and not here."""
    tools = list_of(body, "tools")
    for tool in tools:
        if (kind := tool.get("type")) not in kinds:
            allowed = f"this endpoint serves {kinds[0]} tools with `{schema}` only"
            raise wrong(f"a tool is of type {kind!r:.40}; {allowed}")
    return tuple(function_tool(tool, schema) for tool in tools)


def function_call(number: Any, name: Any, arguments: Any) -> Message:
    """Return a call in the form of chat messages."""
    if not isinstance(name, str) or not isinstance(arguments or "", str | dict):
        raise wrong("a tool call needs the name of the tool, and arguments as an object or as JSON text")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": str(number or ""), "type": "function", "function": {"name": name, "arguments": text}}


def require_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages, of which there must be one."""
    if not messages:
        raise wrong("there are no messages; send at least one")
    return tuple(messages)
