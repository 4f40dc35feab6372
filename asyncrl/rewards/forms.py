"""The forms that a reward function may have, told by the names of its parameters: asyncrl's, TRL's and verl's.

    asyncrl  reward(prompt, response, **columns) -> float, or (float, answer)
    TRL      reward(completions, **kwargs) -> list of float; also `prompts` and columns, each a list
    verl     reward(data_source, solution_str, ground_truth, extra_info=None) -> float, or a dict with `score` and perhaps `pred`

A function of any form is called for one response at a time: TRL's lists have one item. Where the prompts of the data are chat
messages, TRL's functions get messages, as there.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import RewardError

ALLOWED = (
    "(prompt, response, **columns) -> float; TRL's (completions, **kwargs) -> list and verl's (data_source, solution_str, "
    "ground_truth, extra_info=None) -> float are known by these names"
)
# In the place of an answer: the function does not say what the answer is. None: there is none in the
# response.
UNSAID = object()
# Given beside the row's columns: whether the response was cut off.
TRUNCATED = "truncated"
# What TRL's trainer gives to reward functions, and what there is none of here.
ELSEWHERE = frozenset({"completion_ids", "trainer_state", "log_extra", "log_metric"})
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Form:
    """How one function is called: this is asyncrl's own way, others override what differs."""

    # Parameters that may be given by name.
    accepted: frozenset[str]
    # Of these, the ones without a default.
    required: frozenset[str]
    # Whether it takes whatever there is, by `**`.
    takes_all: bool

    def lacking(self, row: Mapping[str, Any]) -> list[str]:
        """Columns that the function cannot do without and that the row has not."""
        return sorted(self.required - row.keys() - {TRUNCATED})

    def arguments(self, prompt: str, response: str, row: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Positional and named arguments of a call."""
        return (prompt, response), self._wanted(row, without={"prompt", "response"})

    def read(self, returned: Any) -> tuple[Any, Any]:
        """(what should be one number, what should be the answer or is `UNSAID`) of what the function returned."""
        return returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, UNSAID)

    def _wanted(self, values: Mapping[str, Any], *, without: set[str]) -> dict[str, Any]:
        return {k: v for k, v in values.items() if (self.takes_all or k in self.accepted) and k not in without}


class TRLForm(Form):
    """Lists of one item."""

    def lacking(self, row: Mapping[str, Any]) -> list[str]:
        return [name for name in Form.lacking(self, row) if name not in ("prompts", "completions")]

    def arguments(self, prompt: str, response: str, row: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
        messages = row.get("prompt")
        is_chat = isinstance(messages, list)
        completion = [{"role": "assistant", "content": response}] if is_chat else response
        given = {"prompts": messages if is_chat else prompt, "completions": completion}
        values = self._wanted(row, without={"prompt", "response"}) | self._wanted(given, without=set())
        return (), {name: [value] for name, value in values.items()}

    def read(self, returned: Any) -> tuple[Any, Any]:
        try:
            [one] = returned
        except (TypeError, ValueError):
            raise RewardError(
                f"returned {str(returned)[:80]!r} for one completion; a function of TRL's form returns a list of one number"
            ) from None
        return one, UNSAID


class VerlForm(Form):
    """The reference answer is in the column `ground_truth`, or in `reward_model` as verl's data have it."""

    def lacking(self, row: Mapping[str, Any]) -> list[str]:
        missing = Form.lacking(self, row)
        given = {"data_source", "solution_str", "extra_info"} | ({"ground_truth"} if _ground_truth(row) is not None else set())
        return [name for name in missing if name not in given]

    def arguments(self, prompt: str, response: str, row: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
        given = {"data_source": row.get("data_source", ""), "extra_info": row.get("extra_info"), "solution_str": response}
        given["ground_truth"] = _ground_truth(row)
        others = self._wanted(row, without={"prompt", "response"})
        return (), others | self._wanted(given, without=set())

    def read(self, returned: Any) -> tuple[Any, Any]:
        return (returned.get("score"), returned.get("pred", UNSAID)) if isinstance(returned, Mapping) else (returned, UNSAID)


def form_of(parameters: Sequence[inspect.Parameter]) -> Form:
    """The form of a function with these parameters. Raises RewardError for one that fits none."""
    names = [one.name for one in parameters if one.kind in (*_POSITIONAL, *_NAMED)]
    if unknown := ELSEWHERE & {one.name for one in parameters if one.default is one.empty}:
        raise RewardError(f"takes {_list(sorted(unknown))}, which there is none of here; give it a default, or leave it out")
    if "completions" in names:
        return _form(TRLForm, parameters)
    if "solution_str" in names:
        return _form(VerlForm, parameters)
    positional = [one.name for one in parameters if one.kind in _POSITIONAL]
    has_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if len(positional) < 2 and not has_any:
        raise RewardError(f"takes ({', '.join(map(str, parameters))}); allowed is {ALLOWED}; take prompt and response first")
    if positional[:1] == ["response"] or positional[1:2] == ["prompt"]:
        raise RewardError(
            f"takes ({', '.join(positional[:2])}), but is called with (prompt, response): each would be taken for the other; "
            "swap the two parameters"
        )
    return _form(Form, parameters[2:] if len(positional) >= 2 else parameters[len(positional) :])


def _form(kind: type[Form], parameters: Sequence[inspect.Parameter]) -> Form:
    named = [one for one in parameters if one.kind in _NAMED]
    return kind(
        accepted=frozenset(one.name for one in named),
        required=frozenset(one.name for one in named if one.default is one.empty),
        takes_all=any(one.kind is one.VAR_KEYWORD for one in parameters),
    )


def _ground_truth(row: Mapping[str, Any]) -> Any:
    model = row.get("reward_model")
    return row.get("ground_truth", model.get("ground_truth") if isinstance(model, Mapping) else None)


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
