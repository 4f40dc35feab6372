"""When a learner saves a checkpoint, what happens if that fails, and what rank 0 does once it is durable."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.batch.coefficients import Coefficients, Tracker
from asyncrl.config.schema import Config
from asyncrl.data.data_files import DataFiles
from asyncrl.errors import CheckpointError
from asyncrl.hosting.progress import Pace, begin
from asyncrl.launch.same_bytes import END
from asyncrl.launch.taking import Taking
from asyncrl.report.reports import Reporting
from asyncrl.run.best import Judged, read_ended, why_ended
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.exports import Exports, Pushes
from asyncrl.run.saved import LearnerState
from asyncrl.trainer.base import Trainer

log = logging.getLogger(__name__)

# Pause between two attempts at the last checkpoint.
AGAIN_S = 1.0
# Attempts at the last checkpoint: a user may make room on a full disk, but a run must end.
LAST_ATTEMPTS = 60


class EndedEarly(Exception):
    """The training is over before its last step, and saved."""


@dataclass(slots=True, kw_only=True)
class Saving:
    """The checkpoints of one rank. Every rank calls every method, in the same order, and fails alike."""

    checkpoints: CheckpointStore
    trainer: Trainer
    every: int  # steps from one checkpoint to the next
    exports: Exports = field(default_factory=Exports, init=False)  # of rank 0; the others begin none
    _is_overdue: bool = field(default=False, init=False)
    _failures: int = field(default=0, init=False)

    def checkpoint(self, version: int, *, last: bool) -> None:
        """Save if it is due. A failed save is due again after the next step, the last one after a second."""
        if last:
            self._save_at_last(version)
        elif self._is_overdue or version % self.every == 0:
            self._is_overdue = not self._try_to_save(version)

    def export(self, version: int) -> None:
        """Begin to export the checkpoint of `version`, if it has no model. The trainer has those weights."""
        is_busy = self.exports.is_under_way
        if export := self.checkpoints.exporter(version, self.trainer, is_busy=is_busy):
            self.exports.begin(version, export)

    def save_and_leave(self, version: int, end: bytes) -> NoReturn:
        """Save. Then end this process with the status of SIGTERM, or after `END` raise EndedEarly."""
        self._save_at_last(version)
        if end != END:
            self.exports.finish()
            self.trainer.broadcast(b"")  # ranks that left rank 0 alone would have it killed
            raise SystemExit(128 + signal.SIGTERM)
        self._ended(version)
        raise EndedEarly

    def _ended(self, version: int) -> None:
        """Called after the save of a training that ends early."""

    def _save_at_last(self, version: int) -> None:
        begin("last checkpoint", Pace.SLOW)
        # Attempts are counted, not timed, so that every rank gives up after the same one.
        for _ in range(LAST_ATTEMPTS):
            if self._try_to_save(version):
                return
            time.sleep(AGAIN_S)
        self._save(version)

    def _try_to_save(self, version: int) -> bool:
        try:
            self._save(version)
        # Every rank gets the same error.
        except CheckpointError as error:
            self._failures += 1
            log.error("step %d is not saved and will be; older checkpoints are as before: %s", version, error)
            return False
        return True

    def _save(self, version: int) -> None:
        self._write(version, {})

    def _write(
        self, version: int, state: dict[str, Any], require_run: Callable[[], object] = lambda: None
    ) -> int:
        """Save, and begin the export; return the oldest step that is kept. See `CheckpointStore.save`."""
        self.exports.wait()  # then the memory of the last copy is free
        oldest = self.checkpoints.save(version, self.trainer, state, require_run)
        self.export(version)
        return oldest


@dataclass(slots=True, kw_only=True)
class LeadSaving(Saving):
    """The checkpoints of rank 0, which also hold the run's own state and allow the store to forget."""

    begun: LearnerState  # the state with which this learner began; its `history` and `fixed` stay
    coefficients: Coefficients
    tracker: Tracker | None = None
    taking: Taking
    reporting: Reporting
    mark_saved: Callable[[], None]
    judged: Judged
    is_shared: bool = False  # other hosts see the directory, and may not see the run's lock
    pushes: Pushes | None = None
    _ledgers: dict[int, Any] = field(default_factory=dict, init=False)  # by step, of this process's saves

    def __post_init__(self) -> None:
        if self.pushes:
            self.exports = Exports(self.pushes.saved)

    def finish(self) -> None:
        """Wait for what is done next to training: the last export, and the last push."""
        self.exports.finish()
        if self.pushes:
            self.pushes.finish()

    def _try_to_save(self, version: int) -> bool:
        if is_saved := Saving._try_to_save(self, version):
            return is_saved
        self.reporting.log({"checkpoint/failed": self._failures}, step=version)
        return False

    def _save(self, version: int) -> None:
        started_s = time.perf_counter()
        ledger, sets, curriculum = self.taking.settled
        self._ledgers[version] = ledger
        now = replace(self.begun, version=version, ledger=ledger, evaluation=sets, curriculum=curriculum)
        tracker, coefficients = self.tracker.state() if self.tracker else {}, self.coefficients.state()
        now = replace(now, coefficients=coefficients, tracker=tracker, stop=self.judged.state())
        # The version is open already, so this only raises BufferFenced if another learner has the run.
        require_run = partial(self.taking.open, version) if self.is_shared else lambda: None
        oldest = self._write(version, now.to_dict(), require_run)
        with self.reporting.guard("the mark that something was saved"):
            self.mark_saved()
        self.reporting.checkpoint(version, time.perf_counter() - started_s)
        self.judged.saved()
        self._ledgers = {step: one for step, one in self._ledgers.items() if step >= oldest}
        # The save is over on every rank. Raised here, the error would make rank 0 save again, alone.
        try:
            ledger = self._ledgers.get(oldest) or self.checkpoints.state(oldest)["ledger"]
        except CheckpointError as error:
            log.error("step %d is saved; the store keeps its groups until the next save: %s", version, error)
        else:
            self.taking.intake.commit(ledger, version)

    def _ended(self, version: int) -> None:
        self.judged.ended(version)


def open_judged(
    config: Config, data: DataFiles, checkpoints: CheckpointStore, directory: Path, state: LearnerState
) -> Judged:
    """Return what decides by metrics which of the `checkpoints` in `directory` stay."""
    stop, ended = config.learner.stop_when, read_ended(directory, state.version)
    # The checkpoint may be older than the reason, and the training has ended.
    is_over = stop is not None and why_ended(stop, ended, data.asked(stop.metric))
    saved = ended if is_over else state.stop
    judged = Judged(config.learner, config.checkpoint, directory, checkpoints.steps, saved, data.asked)
    checkpoints.keeps = judged.keeps
    return judged


def open_pushes(config: Config, directory: Path, stop: threading.Event, step: int) -> Pushes | None:
    """Return the pushes to a hub of the run in `directory`, if it has one. Raises ConfigError at step 0."""
    hub = config.checkpoint.hub
    return Pushes(hub, directory, stop, step=step) if hub else None
