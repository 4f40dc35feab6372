"""Names for ranges of numbers. In a signature they are documentation; `registry.check` holds a config to them.

The table needs no torch, so a config is checked before anything slow is imported.
"""

from collections.abc import Callable
from typing import Any

Positive = float
NonNegative = float
AboveOne = float
Share = float
PositiveInt = int


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "float": (_is_number, "a number"),
    "int": (_is_int, "an integer"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "text"),
    "Positive": (lambda value: _is_number(value) and value > 0, "a number > 0"),
    "NonNegative": (lambda value: _is_number(value) and value >= 0, "a number >= 0"),
    "AboveOne": (lambda value: _is_number(value) and value > 1, "a number > 1"),
    "Share": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "PositiveInt": (lambda value: _is_int(value) and value >= 1, "an integer >= 1"),
}
"""Annotation in a signature -> (test, what to tell the user)."""
