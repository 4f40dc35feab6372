"""A trainer that saves and loads a few numbers, and nothing else."""

from pathlib import Path

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

    def export(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "model.safetensors").write_text(self.value * 100)

    def load(self, directory: Path) -> None:
        self.value = (directory / "weights").read_text()
