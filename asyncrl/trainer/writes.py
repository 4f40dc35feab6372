"""The writes of one rank during a save."""

from collections.abc import Callable
from dataclasses import dataclass

from safetensors import SafetensorError

from asyncrl.hosting.progress import beat


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
