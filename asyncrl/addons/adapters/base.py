"""What adapters share: options of a name, `NAME?key=value&key=value`; JSON in a response; tools of a server.

The tools' schemas stay those of the server, and their names are no attributes of the class: a class with
`__tools__` has the tools in it instead of its methods, see `environments.user_code`.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from inspect import cleandoc
from typing import Any
from urllib.parse import parse_qsl

# Calls a tool: the object of the episode, the tool's name, and the arguments of the model.
Call = Callable[[Any, str, Mapping[str, Any]], Any]


class ToolError(Exception):
    """A tool of a server failed."""


def tools_of(call: Call, *tools: tuple[str, str | None, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the attributes of a class whose tools, of name, text and JSON schema each, `call` calls."""
    least = {"type": "object", "properties": {}}
    schemas = [
        {"name": name, "description": cleandoc(text or name), "parameters": {**least, **schema}}
        for name, text, schema in tools
    ]
    return {"__tools__": [{"type": "function", "function": one} for one in schemas], "__call__": call}


def split_options(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name without its options, and the options. A value is JSON, or text."""
    name, _, text = name.partition("?")
    options: dict[str, Any] = dict(parse_qsl(text, keep_blank_values=True))
    for key, value in options.items():
        with contextlib.suppress(ValueError):
            options[key] = json.loads(value)
    return name, options


def last_json(response: str, begin: str) -> Any:
    """Return the last JSON object or list (by `begin`, its bracket) that is not within another, or None."""
    found, place, decoder = None, 0, json.JSONDecoder()
    while (place := response.find(begin, place)) >= 0:
        try:
            found, place = decoder.raw_decode(response, place)
        except (ValueError, RecursionError):
            place += 1
    return found
