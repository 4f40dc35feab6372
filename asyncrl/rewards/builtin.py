"""The built-in reward functions. A wrong answer scores 0; a row that cannot be scored raises ValueError.

Functions that look for one answer also return it, in a normal form: equal numbers are equal texts.
"""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from asyncrl.rewards.library import LIBRARY, NEEDS, PYTHON, known

_NUMBER = re.compile(
    r"(?<![0-9.])[-+\u2212]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|[-+\u2212]?\.[0-9]+"
)
_FINAL = re.compile(r"####\s*(" + _NUMBER.pattern + ")")


def exact_match(prompt: str, response: str, answer: object) -> tuple[float, str]:
    """1 if the response equals the column `answer`, apart from surrounding white space."""
    return float(response.strip() == known(answer).strip()), response.strip()


def arithmetic(prompt: str, response: str, answer: object) -> tuple[float, str | None]:
    """1 if the first number of the response equals the number in column `answer`."""
    expected = str(answer).strip()
    if not _NUMBER.fullmatch(expected):
        raise ValueError(f"column `answer` holds no number: {expected[:80]!r}")
    found = _NUMBER.search(response)
    return _compare(found[0] if found else None, _value(expected))


def gsm8k(prompt: str, response: str, answer: str) -> tuple[float, str | None]:
    """1 if the first number of the last `####`, else of `#### number`, else the last, is that of `answer`."""
    reference = _FINAL.findall(answer)
    if not reference:
        raise ValueError(f"column `answer` holds no `#### number`: {answer[-80:]!r}")
    _, mark, behind = response.rpartition("####")
    line = behind.lstrip().partition("\n")[0] if mark else ""  # only this one: other marks begin headings
    found = _NUMBER.findall(line)[:1] or (_FINAL.findall(response) or _NUMBER.findall(response))[-1:]
    return _compare(found[0] if found else None, _value(reference[-1]))


def words_used(prompt: str, response: str, words: Sequence[str]) -> float:
    """Share of the column `words` that the response uses as whole words, plural included, in any case."""
    if isinstance(words, str) or not words:
        raise ValueError(f"column `words` must be a list of at least one word, found {words!r}")
    used = [re.search(rf"(?<!\w){re.escape(word)}(s|es)?(?!\w)", response, re.IGNORECASE) for word in words]
    return sum(map(bool, used)) / len(words)


def _compare(found: str | None, expected: Decimal) -> tuple[float, str | None]:
    """The score of the number found in a response, and the number without exponent, -0 and trailing zeros."""
    if found is None:
        return 0.0, None
    value = _value(found)
    text = f"{value:f}" if value else "0"
    return float(value == expected), text.rstrip("0").rstrip(".") if "." in text else text


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", "").replace("\u2212", "-"))


BUILTINS: dict[str, Callable[..., Any]] = {
    "arithmetic": arithmetic,
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "words_used": words_used,
    **LIBRARY,
}


def obstacle(name: str, params: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Say what a built-in function with these `params` needs and this machine lacks; empty if nothing."""
    interpreter = str(params.get("interpreter", PYTHON)) if name == "code" else PYTHON
    if interpreter != PYTHON and shutil.which(interpreter) is None:
        return f"`{name}` needs the interpreter `{interpreter}`, which is no program on PATH; install it"
    needed = NEEDS.get(name)
    if needed is None or find_spec(needed) is not None:
        return ""
    return f"`{name}` needs the package {needed}, which is not installed; pip install 'asyncrl[rewards]'"
