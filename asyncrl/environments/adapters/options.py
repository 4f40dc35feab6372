"""Options of a name, `NAME?option=value&option=value`; a value is JSON, or text."""

import json
from typing import Any
from urllib.parse import parse_qsl


def split_options(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name without its options, and the options."""
    name, _, text = name.partition("?")
    return name, {key: _value(value) for key, value in parse_qsl(text, keep_blank_values=True)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
