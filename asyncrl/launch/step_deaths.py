"""Learners that died in one step, counted on disk: what kills every learner that trains on it must not end the run for good.

A step is begun and ended. A start that finds one begun and not ended counts a death for it, and for nothing else: not while
the learner waits for groups, nor while it saves. Steps are told apart by the bytes that they train on, so that a
replay counts for the same step, and groups that were sampled anew do not answer for the old ones.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from asyncrl.best_effort import BestEffort
from asyncrl.files import read_record, replace_text

MAX_DEATHS = 3
"""In a row, in one step. Fewer than `control.max_restarts` allows by default; over several `asyncrl up` it counts on."""


class _Step(NamedTuple):
    digests: list[str]
    deaths: int


def digest_of(frame: bytes) -> str:
    """Names a frame by its bytes."""
    return xxhash.xxh3_128_hexdigest(frame)


class StepDeaths:
    """The count of one run. A file that cannot be read counts as none, one that cannot be written is tried again."""

    def __init__(self, path: Path) -> None:
        """Counts a death if a step was begun and not ended."""
        self._path, self._may_fail = path, BestEffort()
        self._steps, begun = _read(path)
        if begun in self._steps:
            self._steps[begun] = self._steps[begun]._replace(deaths=self._steps[begun].deaths + 1)
        self._write(None)

    def reason(self, frame: bytes) -> str | None:
        """Why it is to be set aside; None for a frame that has no such history."""
        deadly = [(version, step) for version, step in self._steps.items() if step.deaths >= MAX_DEATHS]
        digest = digest_of(frame) if deadly else ""
        for version, step in deadly:
            if digest in step.digests:
                return f"{step.deaths} learners died as they trained on the {len(step.digests)} groups of step {version + 1}"
        return None

    def begin(self, version: int, frames: Sequence[bytes]) -> None:
        """The learner has the frames of the step from `version`."""
        digests = [digest_of(frame) for frame in frames]
        known = self._steps.get(version)
        if known is None or known.digests != digests:
            self._steps[version] = _Step(digests, 0)
        self._write(version)

    def end(self, version: int) -> None:
        """The step from `version` is trained and reported."""
        self._steps.pop(version, None)
        self._write(None)

    def _write(self, begun: int | None) -> None:
        text = json.dumps({"begun": begun, "steps": self._steps})
        with self._may_fail("the record of the step under way"):
            replace_text(self._path, text)


def _read(path: Path) -> tuple[dict[int, _Step], int | None]:
    """The steps by version, and the one that was begun and not ended."""
    record = read_record(path) or {}
    try:
        steps = {int(version): _Step(list(digests), int(deaths)) for version, (digests, deaths) in record["steps"].items()}
        return steps, None if record["begun"] is None else int(record["begun"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}, None
