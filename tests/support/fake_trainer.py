"""A trainer that saves and loads a few numbers, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.run.checkpoint import CheckpointStore, Exportable

KEY = b"run key"


class FakeTrainer:
    """One rank that writes two files, one of them in a directory, and reads one of them."""

    rank = 0

    def __init__(self, value: str = "") -> None:
        self.value = value

    def broadcast(self, value: bytes | None) -> bytes:
        return value or b""

    def save(self, directory: Path) -> None:
        (directory / "weights").write_text(self.value)

    def export(self) -> Callable[[Path], None]:
        value = self.value * 100

        def write(directory: Path) -> None:
            directory.mkdir()
            (directory / "model.safetensors").write_text(value)

        return write

    def load(self, directory: Path) -> None:
        self.value = (directory / "weights").read_text()


def save_whole(
    store: CheckpointStore, step: int, trainer: Exportable, state: dict[str, Any], *more: Callable[[], object]
) -> int:
    """Save a checkpoint and export it before going on, unlike a learner."""
    oldest = store.save(step, trainer, state, *more)
    if export := store.exporter(step, trainer):
        export()
    trainer.broadcast(b"")
    return oldest
