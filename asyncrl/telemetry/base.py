"""The interface of trackers, and what they share: samples, distributions and tables of samples.

A tracker that fails never stops training: the failure is logged, and the tracker is tried again later
(`fanout.py`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

BIN = re.compile(r"(?P<name>.+)/(?P<at>\d+)")  # `NAME/3`: the share of the distribution NAME at the value 3
COLUMNS = (
    "step", "kind", "prompt", "response", "reward", "parts", "advantage", "versions", "finish_reason",
    "generator_id", "reason", "answer",
)  # fmt: skip
SAMPLES_EVERY = 10  # steps between two tables of one kind: a table at every step would dominate the upload


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One rollout for people to read."""

    step: int
    ticket_id: int
    prompt: str
    response: str
    reward: float
    parts: Mapping[str, float]
    """Value of each reward function."""
    advantage: float
    versions: Sequence[tuple[int, int]]
    """(policy version, number of tokens) for each part of the response that one version sampled."""
    finish_reason: str
    generator_id: str
    kind: str = "train"
    """train | eval | dropped"""
    reason: str = ""
    """Why a dropped rollout was not trained on."""
    answer: str = ""
    """The part of the response that a reward function read as the answer."""


class Tracker(Protocol):
    """Learner metrics have a step, generator metrics have none and are logged by time."""

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
    """(plain numbers, distributions by name). Files keep bins as numbers, trackers can draw them as
    histograms."""
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
        """One row of `COLUMNS` per record; none within `SAMPLES_EVERY` steps after the last table of this
        kind."""
        if not records:
            return []
        step, kind = records[-1].step, records[-1].kind
        if 0 <= step - self._shown_step.get(kind, -SAMPLES_EVERY) < SAMPLES_EVERY:
            return []
        self._shown_step[kind] = step
        rows = [[getattr(record, column) for column in COLUMNS] for record in records]
        return [[cell if isinstance(cell, (str, int, float)) else str(cell) for cell in row] for row in rows]
