"""The writes of one rank during a save, and the failure of any rank."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from asyncrl.errors import CheckpointError
from asyncrl.hosting.progress import beat
from asyncrl.trainer.collectives import Ranks


@dataclass(slots=True)
class Writes:
    """The other writes are skipped after the first failure.

    A rank must not end the save early: the others would wait for it in the next collective.
    """

    # Type and text of the first failure.
    failure: str = ""

    def attempt(self, write: Callable[[], object]) -> None:
        """Run `write`, unless one has failed already."""
        beat()
        if self.failure:
            return
        try:
            write()
        # torch and safetensors wrap the error of a full disk.
        except (OSError, RuntimeError, SafetensorError) as error:
            self.failure = f"{type(error).__name__}: {error}"

    def conclude(self, directory: Path, ranks: Ranks) -> None:
        """Raise CheckpointError on every rank if a write into `directory` failed on one of them."""
        failures = enumerate(ranks.gather(self.failure.encode()))
        if found := "; ".join(f"rank {rank}: {failure.decode()}" for rank, failure in failures if failure):
            raise CheckpointError(f"{directory} could not be written ({found}); look at the disk under it")
