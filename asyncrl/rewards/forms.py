"""Loads and calls reward functions, in forms known by the names of its parameters: asyncrl's, TRL's, verl's.

    asyncrl  reward(prompt, response, **columns) -> float, or (float, answer)
             reward(prompt, responses, **columns) -> list of these, for all responses of a group
             reward(prompts, responses, batch=64, **columns) -> list of these, for at most 64 of any groups
    TRL      reward(completions, **kwargs) -> list of float; also `prompts` and columns, each a list
    verl     reward(data_source, solution_str, ground_truth, extra_info=None) -> float, or a dict with `score`

None in place of a float abstains.

A function with `responses` is called once for a group, for example to rank; its columns are those of the
row, and what differs between responses (`GIVEN`, and `EPISODE_COLUMNS`) comes as lists. With `prompts` before
them it is called for responses of several groups, and all columns are lists. TRL's functions are called once
for a group, too, since they may compare its completions, and all columns are lists. Every other function is
called for one response. If the prompts of the data are chat messages, TRL's functions get messages, as in
TRL, and all others the text that the policy read.
"""

import asyncio
import contextlib
import hashlib
import inspect
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, Self

from asyncrl.errors import RewardError
from asyncrl.plugins import load
from asyncrl.rewards.builtin import BUILTINS, obstacle

# Further columns in a run with an environment: what was said, as chat messages; the number of the model's
# answers; the environment's own `reward`, `parts` and `metrics`.
EPISODE_COLUMNS = ("messages", "turns", "result")

ALLOWED = (
    "(prompt, response, **columns) -> float, or with `responses` -> list for a group, or with `prompts` and "
    "`responses` -> list for several groups; TRL's (completions, "
    "**kwargs) -> list and verl's (data_source, solution_str, ground_truth, extra_info=None) -> float are "
    "known by these names"
)
# `Form.most` of a function that is called for a group, and the default for several groups.
GROUP, BATCH = 0, 64
# Stands for the answer if a function returns no answers. (None means that the response contains none.)
UNSAID = object()
# Arguments in addition to the row's columns, of `RewardInput`.
GIVEN = frozenset({"truncated", "raw_response", "response_tokens"})
# Arguments that TRL's trainer passes to reward functions, but asyncrl does not have.
ELSEWHERE = frozenset({"completion_ids", "trainer_state", "log_extra", "log_metric"})
EMPTY: Mapping[str, Any] = MappingProxyType({})
# A longer answer is replaced by its beginning and a digest, so that equal answers stay equal.
ANSWER_CHARACTERS = 64
# One loop for all calls: a client that a user's module keeps has connections of the loop that opened them.
_LOOP = asyncio.Runner()
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Row = Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Form:
    """asyncrl's own form of calling a function; the other forms override what differs."""

    # Names of the parameters that may be passed by name.
    accepted: frozenset[str]
    # The accepted ones without a default.
    required: frozenset[str]
    # Whether the function has a `**` parameter.
    takes_all: bool
    # Most responses of a call; `GROUP` for all of a group.
    most: int = 1
    # Names of the parameters that are passed by place, and could be passed by name too.
    placed: frozenset[str] = frozenset()
    # Whether a prompt of chat messages stays one.
    takes_chat: ClassVar[bool] = False
    # Columns that reach no parameter, as they have the names of what is passed anyway.
    hidden: ClassVar[Container[str]] = ("prompt", "response")
    # Parameters that the row need not have, in addition to `GIVEN`.
    provided: ClassVar[frozenset[str]] = frozenset()

    def takes(self, name: str) -> bool:
        """Return whether an argument of this name reaches the function."""
        return name in self.accepted or (self.takes_all and name not in self.placed)

    def refusal(self, params: Mapping[str, Any]) -> str:
        """Why the function cannot be called with parameters of the config; empty if it can."""
        unknown = [name for name in params if not self.takes(name) or name in GIVEN]
        if unknown:
            allowed = sorted(self.accepted - GIVEN)
            return f"takes no params {', '.join(unknown)}; allowed are {', '.join(allowed) or 'none'}"
        try:
            self.with_params(params)
        except RewardError as error:
            return str(error)
        return ""

    def with_params(self, params: Mapping[str, Any]) -> Self:
        """The form of the function that is left when these are given. Raises RewardError for a bad batch."""
        left = {name: getattr(self, name) - params.keys() for name in ("accepted", "required")}
        is_batch = self.most > 1 and "batch" in params
        return replace(self, **left, most=_most(params["batch"]) if is_batch else self.most)

    def lacking(self, row: Mapping[str, Any]) -> list[str]:
        """Columns that the function requires and the row does not have."""
        return sorted(self.required - row.keys() - GIVEN - self.provided)

    def arguments(
        self, prompts: Sequence[Any], responses: Sequence[str], rows: Sequence[Row], apart: Collection[str]
    ) -> Arguments:
        """Positional and named arguments of a call for at most `most` responses; see `Reward`."""
        return (prompts[0], responses[0]), self._wanted(rows[0])

    def read(self, returned: Any, count: int) -> list[tuple[Any, Any]]:
        """Score and answer (or `UNSAID`) of each response from the returned value; none is checked yet."""
        return [self._pair(returned)]

    def _pair(self, returned: Any) -> tuple[Any, Any]:
        return returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, UNSAID)

    def _wanted(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if self.takes(name) and name not in self.hidden}


class _GroupForm(Form):
    """asyncrl's own form for functions that see all responses of a group together."""

    hidden: ClassVar[Container[str]] = ("prompt", "responses")

    def arguments(
        self, prompts: Sequence[Any], responses: Sequence[str], rows: Sequence[Row], apart: Collection[str]
    ) -> Arguments:
        named = {name: [row[name] for row in rows] if name in apart else rows[0][name] for name in rows[0]}
        return (prompts[0], list(responses)), self._wanted(named)

    def read(self, returned: Any, count: int) -> list[tuple[Any, Any]]:
        is_list = isinstance(returned, Iterable) and not isinstance(returned, str | Mapping | Set)
        found = list(returned) if is_list else []
        if not is_list or len(found) != count:
            text = f"returned {str(returned)[:80]!r} for {count} responses"
            raise RewardError(f"{text}; allowed is a list of as many numbers")
        return [self._pair(one) for one in found]


class _BatchForm(_GroupForm):
    """asyncrl's own form for functions that see responses of several groups, as for a forward pass."""

    hidden = ("prompts", "responses", "batch")
    provided = frozenset({"batch"})

    def arguments(
        self, prompts: Sequence[Any], responses: Sequence[str], rows: Sequence[Row], apart: Collection[str]
    ) -> Arguments:
        wanted = self._wanted({name: [row.get(name) for row in rows] for row in rows for name in row})
        if "batch" in self.accepted:  # it may have no default
            wanted["batch"] = self.most
        return (list(prompts), list(responses)), wanted


class _TRLForm(_GroupForm):
    """TRL's form: every argument, and the returned value, is a list with an item for each response."""

    takes_chat = True
    hidden = Form.hidden
    provided = frozenset({"prompts", "completions"})

    def arguments(
        self, prompts: Sequence[Any], responses: Sequence[str], rows: Sequence[Row], apart: Collection[str]
    ) -> Arguments:
        is_chat = not isinstance(prompts[0], str)
        completions = [[{"role": "assistant", "content": one}] if is_chat else one for one in responses]
        named = {name: [row.get(name) for row in rows] for row in rows for name in row}
        return (), self._wanted(named | {"prompts": list(prompts), "completions": completions})


class _VerlForm(Form):
    """verl's form: the answer is column `ground_truth`, or `ground_truth` in column `reward_model`."""

    provided = frozenset({"data_source", "solution_str", "extra_info"})

    def lacking(self, row: Mapping[str, Any]) -> list[str]:
        has_answer = ground_truth(row) is not None
        return [name for name in super().lacking(row) if name != "ground_truth" or not has_answer]

    def arguments(
        self, prompts: Sequence[Any], responses: Sequence[str], rows: Sequence[Row], apart: Collection[str]
    ) -> Arguments:
        [response], [row] = responses, rows
        given = {
            "data_source": row.get("data_source", ""),
            "extra_info": row.get("extra_info"),
            "solution_str": response,
            "ground_truth": ground_truth(row),
        }
        return (), self._wanted({**row, **given})

    def read(self, returned: Any, count: int) -> list[tuple[Any, Any]]:
        if isinstance(returned, Mapping):
            if "score" not in returned:
                raise RewardError(
                    f"returned {str(returned)[:80]} without `score`; a dict has the reward there"
                )
            return [(returned["score"], returned.get("pred", UNSAID))]
        return [(returned, UNSAID)]


def form_of(parameters: Sequence[inspect.Parameter]) -> Form:
    """The form of a function with these parameters. Raises RewardError if it fits none."""
    names = [one.name for one in parameters if one.kind in (*_POSITIONAL, *_NAMED)]
    if unknown := ELSEWHERE & {one.name for one in parameters if one.default is one.empty}:
        found = ", ".join(f"`{name}`" for name in sorted(unknown))
        raise RewardError(f"takes {found}, which asyncrl does not have; give it a default, or leave it out")
    if "completions" in names:
        return _form(_TRLForm, parameters, most=GROUP)
    if "solution_str" in names:
        return _form(_VerlForm, parameters)
    positional = [one.name for one in parameters if one.kind in _POSITIONAL]
    has_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if len(positional) < 2 and not has_any:
        raise RewardError(
            f"takes ({', '.join(map(str, parameters))}); allowed is {ALLOWED}; take prompt and response first"
        )
    if positional[:2] == ["prompts", "responses"]:
        default = next((one.default for one in parameters if one.name == "batch"), BATCH)
        return _form(_BatchForm, parameters, 2, most=_most(default))
    if "responses" in positional[1:2]:
        return _form(_GroupForm, parameters, 2, most=GROUP)
    if positional[:1] == ["response"] or positional[1:2] == ["prompt"]:
        swapped = positional[:2] == ["response", "prompt"]
        cure = "swap the two parameters" if swapped else "take `prompt` and `response` first, in this order"
        raise RewardError(
            f"takes ({', '.join(positional[:2])}), but is called with (prompt, response): {cure}"
        )
    return _form(Form, parameters, min(len(positional), 2))


def _form(
    kind: type[Form], parameters: Sequence[inspect.Parameter], placed: int = 0, *, most: int = 1
) -> Form:
    named = [one for one in parameters[placed:] if one.kind in _NAMED]
    return kind(
        accepted=frozenset(one.name for one in named),
        required=frozenset(one.name for one in named if one.default is one.empty),
        takes_all=any(one.kind is one.VAR_KEYWORD for one in parameters),
        most=most,
        placed=frozenset(one.name for one in parameters[:placed] if one.kind in _NAMED),
    )


def _most(batch: Any) -> int:
    """Most responses of a call, of the parameter `batch`; its default is not known in a source."""
    if batch is ... or batch is inspect.Parameter.empty:
        return BATCH
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 2:
        raise RewardError(f"has batch={batch!r}; allowed are whole numbers from 2 on")
    return batch


def ground_truth(row: Mapping[str, Any]) -> Any:
    """Return the reference answer of a row in the layout of verl; None without one."""
    model = row.get("reward_model")
    return row.get("ground_truth", model.get("ground_truth") if isinstance(model, Mapping) else None)


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
