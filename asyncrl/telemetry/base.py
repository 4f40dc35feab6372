"""Where numbers go. A tracker that fails never stops training; it is told once, and tried again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One rollout for people to read."""

    step: int
    ticket_id: int
    prompt: str
    response: str
    reward: float
    parts: Mapping[str, float]
    advantage: float
    versions: Sequence[tuple[int, int]]
    """(version, tokens) spans"""
    finish_reason: str
    generator_id: str
    kind: str = "train"
    """train | eval | dropped"""
    reason: str = ""
    """Why a dropped one was not trained."""
    answer: str = ""
    """What a reward function took for the answer."""


class Tracker(Protocol):
    """Learner metrics go by step, generator metrics by time (step None)."""

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None: ...

    def samples(self, records: Sequence[SampleRecord]) -> None: ...

    def close(self) -> None: ...
