"""The interface of trackers, and the record of a sample."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol


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
    eval_set: str = ""
    """Name of its set, if data.eval names sets."""
    prompt_number: int = 0
    """Place of the prompt among those of an evaluation, from 1."""
    sample_number: int = 0
    """Place of the episode among those of its prompt, from 1; an episode may be several records."""


def sample_from(record: Mapping[str, Any]) -> SampleRecord:
    """Return the rollout of a JSON object. Null becomes the default, unknown fields are left out."""
    names = (item.name for item in fields(SampleRecord))
    return SampleRecord(**{name: record[name] for name in names if record.get(name) is not None})


class Tracker(Protocol):
    """Receives metrics and samples. Learner metrics have a step; generator metrics have a time only.

    A tracker that fails does not stop training (`fanout.py`).
    """

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None: ...

    def samples(self, records: Sequence[SampleRecord]) -> None: ...

    def close(self) -> None: ...
