"""The interface of trackers, and what they share: samples, distributions and tables of samples."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

BIN = re.compile(r"(?P<name>.+)/(?P<at>\d+)")  # `NAME/3`: the share of the distribution NAME at the value 3
COLUMNS = (
    "step", "kind", "prompt", "response", "reward", "parts", "advantage", "versions", "finish_reason",
    "generator_id", "reason", "answer",
)  # fmt: skip
SAMPLES_EVERY = 10  # steps between two tables of one kind: a table at every step would dominate the upload


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One rollout for people to read; a group without rollouts leaves most of it empty."""

    step: int = 0
    ticket_id: int = 0
    prompt: str = ""
    response: str = ""
    reward: float = math.nan
    parts: Mapping[str, float] = field(default_factory=dict)
    """Value of each reward function."""
    advantage: float = math.nan
    versions: Sequence[tuple[int, int]] = ()
    """(policy version, number of tokens) for each part of the response that one version sampled."""
    finish_reason: str = ""
    generator_id: str = ""
    kind: str = "train"
    """train | eval | dropped"""
    reason: str = ""
    """Why a dropped rollout was not trained on."""
    answer: str = ""
    """The part of the response that a reward function read as the answer."""
    judgements: Sequence[Mapping[str, Any]] = ()
    """Questions to judges and their answers: `part`, `prompt`, `answer` and `score` of each."""
    prompt_number: int = 0
    """Place of the prompt among those of an evaluation, from 1."""
    sample_number: int = 0
    """Place of the episode among those of its prompt, from 1; an episode may be several records."""


class Tracker(Protocol):
    """Receives metrics and samples. Learner metrics have a step; generator metrics have a time only.

    A tracker that fails does not stop training (`fanout.py`).
    """

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None: ...

    def samples(self, records: Sequence[SampleRecord]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Weights of the values 0, 1, 2, ...; bin i reaches from i to i + 1."""

    counts: tuple[float, ...]

    @property
    def edges(self) -> tuple[float, ...]:
        """Edges of the bins: one more than `counts`."""
        return tuple(map(float, range(len(self.counts) + 1)))


def split(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, Histogram]]:
    """Return (plain numbers, distributions by name) of metrics that have one number for each bin."""
    numbers: dict[str, float] = {}
    bins: dict[str, dict[int, float]] = {}
    for name, value in metrics.items():
        if found := BIN.fullmatch(name):
            bins.setdefault(found["name"], {})[int(found["at"])] = float(value)
        else:
            numbers[name] = value
    return numbers, {
        f"{name}/histogram": Histogram(counts=tuple(at.get(index, 0.0) for index in range(max(at) + 1)))
        for name, at in bins.items()
    }


class SampleTables:
    """Selects the rollouts that trackers show as tables."""

    def __init__(self) -> None:
        self._shown_step: dict[str, int] = {}

    def rows(self, records: Sequence[SampleRecord]) -> list[list[str | int | float]]:
        """Return a row of `COLUMNS` per record; no rows within `SAMPLES_EVERY` steps after the last ones."""
        if not records:
            return []
        step, kind = records[-1].step, records[-1].kind
        if 0 <= step - self._shown_step.get(kind, -SAMPLES_EVERY) < SAMPLES_EVERY:
            return []
        self._shown_step[kind] = step
        rows = [[getattr(record, column) for column in COLUMNS] for record in records]
        return [[cell if isinstance(cell, (str, int, float)) else str(cell) for cell in row] for row in rows]
