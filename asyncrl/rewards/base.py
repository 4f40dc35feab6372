"""What a reward function is, and what scores rollouts with them.

A reward function is any callable

    def reward(prompt: str, response: str, **columns) -> float | tuple[float, str | None]

that takes the dataset row's columns it names (or `**columns`), may be `async`, and returns a finite number, or with it the answer
that it found in the response, as votes are counted by it (None where it found none).
Raising, hanging, or returning anything else is a failure of the ticket, never a score of 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """What every reward function is called with."""

    prompt: str
    response: str
    # The other columns of the dataset row.
    row: Mapping[str, Any]
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One scored response."""

    # Sum of weight times part.
    total: float
    # Unweighted, by part name.
    parts: Mapping[str, float]
    # As in `Rollout`; of several functions that give one, the first's.
    answer: str | None = None


class Scorer(Protocol):
    """Scores the responses of a group."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """One score per input. Raises RewardError with the reason: raised, timed out, not a finite number."""
        ...

    async def close(self) -> None: ...
