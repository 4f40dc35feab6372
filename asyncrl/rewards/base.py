"""Reward functions, and the interface of a scorer, which calls them.

A reward function is any callable

    def reward(prompt: str, response: str, **columns) -> float | tuple[float, str | None] | None

It gets the columns of the dataset row that it names (or all with `**columns`), and may be `async`. With an
environment there are further columns (`EPISODE_COLUMNS`), and the response is the last answer. It returns
a finite number, or a pair of the number and the answer in the response (None without one), for votes. None
in place of the number abstains: the other functions score the response. If a function raises, hangs or
returns anything else, or if all abstain, the ticket fails; that is never a score of 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# Further columns in a run with an environment: what was said, as chat messages; the number of the model's
# answers; the environment's own `reward`, `parts` and `metrics`.
EPISODE_COLUMNS = ("messages", "turns", "result")
# The error if no function scores a response.
ABSTAINED = (
    "every reward function returned None for a response, so nothing scores it; return a number from one of "
    "them, or remove such rows from the data"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """The input of every reward function."""

    prompt: str
    response: str
    # The dataset row, whose columns become arguments.
    row: Mapping[str, Any]
    # Decodes the response with its special tokens, but without the stop token at its end, for functions that
    # take this argument; None if it has none.
    raw_response: Callable[[], str] | None = None
    # Whether the response was cut off at the length limit.
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One scored response."""

    # Sum of weight times part, over the parts that there are.
    total: float
    # Unweighted parts, by name, of the functions that did not abstain.
    parts: Mapping[str, float]
    # As in `Rollout`; the first one, if several functions return answers.
    answer: str | None = None


class Scorer(Protocol):
    """Scores the responses of a group."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """One score per input, without parts if all functions abstain.

        Raises RewardError if a function raises, hangs, or returns anything else.
        """
        ...

    async def close(self) -> None: ...
