"""Counts, on disk, the learners that died in a step, so that a group that kills every learner is set aside.

A start that finds a step begun and not ended counts a death for each group of that step. Deaths while the
learner waits for groups, or while it saves, do not count. A group is known by the bytes of its frame, so a
replay continues its count, and a group that was sampled again starts at 0. The group that kills is found even
if the others of the step change: some of them are lost with the weights of the learner that died.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from asyncrl.best_effort import BestEffort
from asyncrl.files import read_record, replace_text

# Deaths in one step, also over several `asyncrl up`; fewer than `control.max_restarts` by default.
MAX_DEATHS = 3


class StepDeaths:
    """The count of one run. A file that cannot be read counts as empty; a failed write is tried again."""

    def __init__(self, path: Path) -> None:
        """Count a death if a step was begun and not ended."""
        self._path, self._may_fail = path, BestEffort()
        self._steps: dict[int, dict[str, int]] = {}  # deaths by group, by version of the step
        begun: int | None = None  # the step that was begun and not ended
        record = read_record(path) or {}
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            steps = {
                int(version): {digest: int(deaths) for digest, deaths in step.items()}
                for version, step in record["steps"].items()
            }
            begun = None if record["begun"] is None else int(record["begun"])
            self._steps = steps
        if begun in self._steps:
            self._steps[begun] = {digest: deaths + 1 for digest, deaths in self._steps[begun].items()}
        self._write(None)

    def reason(self, frame: bytes) -> str | None:
        """Say why the frame must be set aside; None for a frame that killed too few learners."""
        digest = xxhash.xxh3_128_hexdigest(frame) if self._steps else ""
        for version, step in self._steps.items():
            if step.get(digest, 0) >= MAX_DEATHS:
                died, groups = step[digest], sum(deaths >= MAX_DEATHS for deaths in step.values())
                return f"{died} learners died as they trained on the {groups} groups of step {version + 1}"
        return None

    def begin(self, version: int, frames: Sequence[bytes]) -> None:
        """Record that the learner begins the step from `version`, with these frames."""
        known = self._steps.get(version, {})
        # A group that is no longer there is not what kills the learners of this step.
        digests = map(xxhash.xxh3_128_hexdigest, frames)
        self._steps[version] = {digest: known.get(digest, 0) for digest in digests}
        self._write(version)

    def end(self, version: int) -> None:
        """Record that the step from `version` is trained and reported."""
        self._steps.pop(version, None)
        self._write(None)

    def _write(self, begun: int | None) -> None:
        text = json.dumps({"begun": begun, "steps": self._steps})
        with self._may_fail("the record of the step under way"):
            replace_text(self._path, text)
