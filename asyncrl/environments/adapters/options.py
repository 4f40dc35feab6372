"""What adapters read: the options of a name, `NAME?option=value&option=value`, and JSON in a response."""

import json
from typing import Any
from urllib.parse import parse_qsl


def split_options(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name without its options, and the options. A value is JSON, or text."""
    name, _, text = name.partition("?")
    return name, {key: _value(value) for key, value in parse_qsl(text, keep_blank_values=True)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def last_json(response: str, begin: str) -> Any:
    """Return the last JSON object or list (by `begin`, its bracket) that is not within another, or None."""
    found, place, decoder = None, 0, json.JSONDecoder()
    while (place := response.find(begin, place)) >= 0:
        try:
            found, place = decoder.raw_decode(response, place)
        except (ValueError, RecursionError):
            place += 1
    return found
