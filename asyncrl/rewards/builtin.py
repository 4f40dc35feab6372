"""The built-in reward functions. A wrong answer scores 0; a row that cannot be judged raises.

Those that look for one answer give it beside the score, written in one way: answers that are equal are equal texts.
"""

import re
from collections.abc import Sequence
from decimal import Decimal

_NUMBER = re.compile(r"(?<![0-9.])[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|[-+]?\.[0-9]+")
_FINAL = re.compile(r"####\s*(" + _NUMBER.pattern + ")")


def exact_match(prompt: str, response: str, answer: object) -> tuple[float, str]:
    """1 if the response is the column `answer`, white space around both aside."""
    return float(response.strip() == str(answer).strip()), response.strip()


def arithmetic(prompt: str, response: str, answer: object) -> tuple[float, str | None]:
    """1 if the first number of the response equals the number in column `answer`."""
    found = _NUMBER.search(response)
    return _judged(found[0] if found else None, _expected(str(answer).strip()))


def gsm8k(prompt: str, response: str, answer: str) -> tuple[float, str | None]:
    """1 if the final answer is that of column `answer` (after `#### `).

    The final answer is the number after the last `####`, or without one the last number of the response.
    """
    reference = _FINAL.findall(answer)
    if not reference:
        raise ValueError(f"column `answer` holds no `#### number`: {answer[-80:]!r}")
    found = _FINAL.findall(response) or _NUMBER.findall(response)
    return _judged(found[-1] if found else None, _value(reference[-1]))


def words_used(prompt: str, response: str, words: Sequence[str]) -> float:
    """Share of the column `words` that the response uses as whole words, plural included, in any case."""
    if isinstance(words, str) or not words:
        raise ValueError(f"column `words` must be a list of at least one word, found {words!r}")
    return sum(bool(re.search(rf"\b{re.escape(word)}(s|es)?\b", response, re.IGNORECASE)) for word in words) / len(words)


def _judged(found: str | None, expected: Decimal) -> tuple[float, str | None]:
    """Score and answer of the number that was found in a response."""
    return (0.0, None) if found is None else (float(_value(found) == expected), _written(_value(found)))


def _written(value: Decimal) -> str:
    """Without a sign of 0, an exponent, and zeros at the end of a fraction."""
    text = f"{value:f}" if value else "0"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", ""))


def _expected(number: str) -> Decimal:
    if not _NUMBER.fullmatch(number):
        raise ValueError(f"column `answer` holds no number: {number[:80]!r}")
    return _value(number)


BUILTINS = {function.__name__: function for function in (exact_match, arithmetic, gsm8k, words_used)}
