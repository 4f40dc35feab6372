"""The best value of a metric: which checkpoint is kept for it, and whether the training ends early."""

import json
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from asyncrl.best_effort import BestEffort
from asyncrl.config.checkpoint_section import CheckpointConfig, StopConfig
from asyncrl.config.sections import LearnerConfig
from asyncrl.files import read_record, replace_text
from asyncrl.run.manifest import FileOps

log = logging.getLogger(__name__)

# Files next to the checkpoints: the record of the best one, and that with which the training ended early.
BEST, ENDED = "BEST", "ENDED"


@dataclass(slots=True)
class Record:
    """The best value of one metric so far."""

    metric: str
    best_is: Literal["highest", "lowest"]
    step: int = -1  # -1 before the first value
    value: float = 0.0
    worse: int = 0  # values since then, none of them better
    asked: str = ""  # as `DataFiles.asked`

    def resumed(self, saved: Mapping[str, Any] | None) -> Self:
        """Take over what was saved, if it is of the same metric and evaluation; return this record."""
        # Earlier releases did not save what is asked, or the digest alone.
        is_asked = saved and self.asked.startswith(saved.get("asked", ""))
        if saved and is_asked and (saved.get("metric"), saved.get("best_is")) == (self.metric, self.best_is):
            self.step, self.value, self.worse = int(saved["step"]), float(saved["value"]), int(saved["worse"])
        return self

    def add(self, step: int, value: float) -> bool:
        """Take in a value, finite as JSON needs it; return whether it is the best so far. NaN never is."""
        value = min(max(value, -sys.float_info.max), sys.float_info.max)
        is_better = value > self.value if self.best_is == "highest" else value < self.value
        is_best = value == value and (self.step < 0 or is_better)
        if is_best:
            self.step, self.value, self.worse = step, value, 0
        else:
            self.worse += 1
        return is_best


def read_best(checkpoints: Path) -> dict[str, Any] | None:
    """Return the record of the best checkpoint; None without one."""
    return read_record(checkpoints / BEST)


def read_ended(checkpoints: Path, step: int) -> dict[str, Any]:
    """Return the record with which the training ended after `step`; empty if it has not ended there."""
    found = read_record(checkpoints / ENDED) or {}
    return dict(found["record"]) if found.get("step") == step else {}


def why_ended(stop: StopConfig | None, saved: Mapping[str, Any], asked: str = "") -> str:
    """Say why the training ends before its last step; empty if it goes on. `saved` is a record, or empty."""
    if stop is None or (record := Record(stop.metric, stop.best_is, asked=asked).resumed(saved)).step < 0:
        return ""
    found, sign = f"{stop.metric} was {record.value:g} at step {record.step}", 1
    if stop.best_is == "lowest":
        sign = -1
    if stop.reaches is not None and sign * record.value >= sign * stop.reaches:
        return f"{found}, and learner.stop_when.reaches is {stop.reaches:g}"
    if stop.patience is not None and record.worse >= stop.patience:
        return f"{found}, and none of {record.worse} later values was better (learner.stop_when.patience)"
    return ""


class Judged:
    """Both uses of a metric, on rank 0: which checkpoint is kept for it, and whether the training ends."""

    def __init__(
        self,
        learner: LearnerConfig,
        checkpoint: CheckpointConfig,
        directory: Path,
        steps: Callable[[], Collection[int]],
        saved: Mapping[str, Any],
        asked: Callable[[str], str] = lambda metric: "",
    ) -> None:
        """Continue from `BEST` in `directory`, and from the record `saved` of `learner.stop_when`.

        `steps` returns the steps of the checkpoints that are kept; `asked` is `DataFiles.asked`.
        """
        self._directory, self._steps, self._config = directory, steps, checkpoint
        self._stop = learner.stop_when
        self._files, self._may_fail = FileOps(), BestEffort()
        self._values: dict[int, float] = {}  # of steps that may still be saved
        best, stop = checkpoint.best, self._stop
        self._best = Record(best, checkpoint.best_is, asked=asked(best)) if best is not None else None
        if self._best and (found := read_best(directory)) and found.get("step") in steps():
            self._best.resumed(found)
        record = Record(stop.metric, stop.best_is, asked=asked(stop.metric)) if stop is not None else None
        self._record = record and record.resumed(saved)
        self._seen = set[int]()  # steps that were saved
        self._missed = set[str]()  # keys whose metric was looked for in vain

    def see(self, metrics: Mapping[str, float], step: int) -> None:
        """Take in the metrics of a step or of an evaluation."""
        if self._best and (value := self._found("checkpoint.best", self._best, metrics, step)) is not None:
            self._values[step] = value
            self.saved()
        record, key = self._record, "learner.stop_when.metric"
        if record and not self.why_ended() and (value := self._found(key, record, metrics, step)) is not None:
            record.add(step, value)

    def _found(self, key: str, record: Record, metrics: Mapping[str, float], step: int) -> float | None:
        """Return the metric, if it is there. The first time that it should be and is not, say so."""
        value, kind = metrics.get(record.metric), record.metric.rpartition("/")[0]
        # Every step has it, or every round of evaluation in which a prompt was scored.
        sign = f"{kind}/reward_mean" if kind.partition("/")[0] == "eval" else "time/step"
        if value is None and record.step < 0 and sign in metrics and key not in self._missed:
            self._missed.add(key)
            text = "%s is %s, which step %d does not have; steps without it are not judged"
            log.warning(text, key, record.metric, step)
        return value

    def saved(self) -> None:
        """Compare the values of the steps that are saved by now. An older step is not judged any more."""
        if self._best is None:
            return
        with self._may_fail("the record of the best checkpoint"):
            steps = self._steps()
            self._seen.update(steps)
            for step in [step for step in sorted(self._values) if step <= max(steps, default=0)]:
                value = self._values.pop(step)
                if step in steps and self._best.add(step, value):
                    self._files.replace(self._directory / BEST, json.dumps(asdict(self._best)).encode())
                    self._files.fsync(self._directory)
                elif step in self._seen.difference(steps):
                    text = "%s of step %d came after its checkpoint was removed; set a higher checkpoint.keep"
                    log.warning(text, self._best.metric, step)

    def keeps(self, step: int) -> bool:
        """Whether the checkpoint of a step stays when newer ones are saved."""
        every = self._config.every * (self._config.keep_every or 0)
        is_best = self._best is not None and step == self._best.step
        return is_best or (every > 0 and step % every == 0)

    def state(self) -> dict[str, Any]:
        """Return the record of `learner.stop_when` for the checkpoint; empty without one."""
        return asdict(self._record) if self._record is not None else {}

    def why_ended(self) -> str:
        """Say why the training ends before its last step; empty if it goes on."""
        state = self.state()
        return why_ended(self._stop, state, state.get("asked", ""))

    def ended(self, step: int) -> None:
        """Record that the training has ended after `step`. Its checkpoint may be older than the reason."""
        with self._may_fail("the record of the end"):
            text = json.dumps({"step": step, "record": self.state()})
            replace_text(self._directory / ENDED, text, durable=True)
