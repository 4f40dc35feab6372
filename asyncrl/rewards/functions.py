"""Loads reward functions by name, calls them, and checks what they return."""

import asyncio
import contextlib
import hashlib
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from types import MappingProxyType
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.plugins import load
from asyncrl.rewards.builtin import BUILTINS, obstacle
from asyncrl.rewards.forms import GIVEN, UNSAID, Form, Row, form_of

EMPTY: Mapping[str, Any] = MappingProxyType({})
# A longer answer is replaced by its beginning and a digest, so that equal answers stay equal.
ANSWER_CHARACTERS = 64
# One loop for all calls: a client that a user's module keeps has connections of the loop that opened them.
_LOOP = asyncio.Runner()


def load_function(name: str, params: Mapping[str, Any] = EMPTY) -> Callable[..., Any]:
    """Load `package.module:function`, `path.py:function` or a built-in with `params`. Raises RewardError."""
    if ":" not in name:
        if lacking := obstacle(name, params):
            raise RewardError(lacking)
        if name in BUILTINS:
            return BUILTINS[name]
        raise RewardError(
            f"reward function `{name}` is no built-in ({', '.join(sorted(BUILTINS))}); "
            "name your own as `package.module:function` or `path.py:function`"
        )
    try:
        return load(name)
    except ImportError as error:
        raise RewardError(str(error)) from error


def form_for(function: Callable[..., Any]) -> Form:
    """The form of a function. Raises RewardError for an unknown one."""
    try:
        return form_of(list(inspect.signature(function).parameters.values()))
    except ValueError:  # some built-in types have no signature
        return Form(accepted=frozenset(), required=frozenset(), takes_all=False)


# Prompts, responses, the columns of each, and optionally the names of those that differ within a group.
Reward = Callable[..., list[tuple[float, str | None]]]


def bind(function: Callable[..., Any], params: Mapping[str, Any] = EMPTY) -> Reward:
    """Wrap a function of any form, async or not, as (prompts, responses, columns of each) -> pairs.

    For a form that `takes_chat`, a prompt is a text or a list of messages. A pair is (reward, answer); the
    reward is NaN if the function abstains (None). `params` are arguments by name, before columns of these
    names. Raises RewardError for an unknown form or parameter. The wrapper raises it for a missing column,
    and for a result that is not a finite number or not an answer; the function's own exceptions pass through.
    """
    form = form_for(function)
    if problem := form.refusal(params):
        raise RewardError(problem)
    form = form.with_params(params)

    def call(
        prompts: Sequence[Any], responses: Sequence[str], rows: Sequence[Row], apart: Collection[str] = GIVEN
    ) -> list[tuple[float, str | None]]:
        for row in rows:
            if missing := form.lacking(row):
                raise RewardError(f"wants column(s) {missing}, which the row lacks; it has {sorted(row)}")
        others = [{name: row[name] for name in row if name not in params} for row in rows]
        positional, named = form.arguments(prompts, responses, others, apart)
        value = function(*positional, **{**named, **params})
        returned = _LOOP.get_loop().run_until_complete(value) if inspect.isawaitable(value) else value
        return [
            (math.nan, None)
            if reward is None
            else (checked_reward(reward), None if answer is UNSAID else checked_answer(answer))
            for reward, answer in form.read(returned, len(responses))
        ]

    return call


def checked_reward(value: object) -> float:
    """`value` as a float, True as 1, or RewardError: text, NaN or infinity is a mistake, not a reward.

    A number or bool of NumPy, and a tensor of one element, count as what they hold.
    """
    if not isinstance(value, Real) and callable(item := getattr(value, "item", None)):
        with contextlib.suppress(ValueError, RuntimeError):  # of several elements
            value = item()
    if not isinstance(value, Real | Decimal):
        found = f"{type(value).__name__} `{str(value)[:80]}`"
        raise RewardError(f"returned {found}; a reward is one finite number, or None to abstain")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"returned {number}; a reward must be finite")
    return number


def checked_answer(answer: object) -> str:
    """`answer` as a short text, empty for None. Raises RewardError for another type than text and number."""
    if answer is None:
        return ""
    if isinstance(answer, bool) or not isinstance(answer, str | Real | Decimal):
        found = f"{type(answer).__name__} `{str(answer)[:80]}`"
        raise RewardError(
            f"returned {found} as the answer; an answer is a text, a number, or None if the response has none"
        )
    data = str(answer).strip().encode("utf-8", "replace")
    text = data.decode()
    if len(text) <= ANSWER_CHARACTERS:
        return text
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    return f"{text[: ANSWER_CHARACTERS - len(digest) - 1]}…{digest}"
