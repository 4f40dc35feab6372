"""A learner whose saves fail."""

from pathlib import Path
from typing import Any
from unittest import mock

from asyncrl.launch import learner_process as learner
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.file_ops import FileOps
from asyncrl.run.learner_state import LearnerState
from tests.support.fake_trainer import KEY, FakeTrainer


class FakeHead:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def state(self, version: int, coefficients: dict[str, float]) -> LearnerState:
        return LearnerState(version=version)

    def saved(self, oldest: LearnerState, seconds: float) -> None:
        self.events.append(("commit", oldest.version))

    def save_failed(self, count: int) -> None:
        self.events.append(("failed", count))


def run_on(root: Path, disk: FileOps, every: int = 2) -> tuple[learner.LearnerRun, FakeHead]:
    head, config, coefficients = FakeHead(), mock.Mock(), mock.Mock()
    config.checkpoint.every = every
    coefficients.state.return_value = {}
    store = CheckpointStore(root, KEY, 2, disk)
    run: Any = learner.LearnerRun(config, FakeTrainer("weights"), store, (), coefficients, head, None, None)  # type: ignore[arg-type]
    return run, head
