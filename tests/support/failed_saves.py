"""Rank 0's checkpoints, whose saves fail."""

from pathlib import Path
from typing import Any
from unittest import mock

from asyncrl.best_effort import BestEffort
from asyncrl.buffer.ledger import Ledger
from asyncrl.config.checkpoint_section import CheckpointConfig
from asyncrl.config.sections import LearnerConfig
from asyncrl.launch import saving
from asyncrl.run.best import Judged
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.manifest import FileOps
from asyncrl.run.saved import LearnerState
from tests.support.fake_trainer import KEY, FakeTrainer


class Around:
    """What rank 0 has beside its checkpoints; it writes down what it is told."""

    def __init__(self) -> None:
        self.guard, self.intake = BestEffort(), self
        self.events: list[Any] = []
        self._saves = 0

    @property
    def settled(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The ledger says the how manieth attempt at a save it is of."""
        self._saves += 1
        return Ledger(takes=self._saves).to_dict(), {}, {}

    def commit(self, ledger: dict[str, Any], version: int) -> None:
        self.events.append(("commit", ledger["takes"]))

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self.events.append(("failed", metrics["checkpoint/failed"]))

    def checkpoint(self, version: int, seconds: float) -> None: ...

    def mark_saved(self) -> None: ...


def run_on(root: Path, disk: FileOps, every: int = 2) -> tuple[saving.LeadSaving, Around]:
    store, around, coefficients = CheckpointStore(root, KEY, 2, disk), Around(), mock.Mock()
    coefficients.state.return_value = {}
    parts: dict[str, Any] = {"taking": around, "reporting": around, "mark_saved": around.mark_saved}
    parts["judged"] = Judged(LearnerConfig(), CheckpointConfig(), root, store.steps, {})
    trainer: Any = FakeTrainer("weights")
    made = saving.LeadSaving(
        checkpoints=store,
        trainer=trainer,
        every=every,
        begun=LearnerState(),
        coefficients=coefficients,
        **parts,
    )
    return made, around
