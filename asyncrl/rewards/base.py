"""Reward functions, and the interface of a scorer, which calls them.

A reward function is any callable

    def reward(prompt: str, response: str, **columns) -> float | tuple[float, str | None]

It gets the columns of the dataset row that it names (or all with `**columns`), and may be `async`. With an
environment there are further columns (`EPISODE_COLUMNS`), and the response is the last answer. It returns
a finite number, or a pair of the number and the answer in the response (None without one), for votes. If it
raises, hangs or returns anything else, the ticket fails; that is never a score of 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# Further columns in a run with an environment: what was said, as chat messages; the number of the model's
# answers; the environment's own `reward`, `parts` and `metrics`.
EPISODE_COLUMNS = ("messages", "turns", "result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """The input of every reward function."""

    prompt: str
    response: str
    # The dataset row, whose columns become arguments.
    row: Mapping[str, Any]
    # Whether the response was cut off at the length limit.
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One scored response."""

    # Sum of weight times part.
    total: float
    # Unweighted parts, by name.
    parts: Mapping[str, float]
    # As in `Rollout`; the first one, if several functions return answers.
    answer: str | None = None


class Scorer(Protocol):
    """Scores the responses of a group."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """One score per input. Raises RewardError if a function raises, hangs, or returns anything else."""
        ...

    async def close(self) -> None: ...
