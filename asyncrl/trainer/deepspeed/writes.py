"""One rank's writes in one save: after the first that fails, the others are skipped."""

from collections.abc import Callable
from dataclasses import dataclass

from safetensors import SafetensorError

from asyncrl.progress import beat


@dataclass(slots=True)
class Writes:
    """The writes of one rank in one save: after one that failed the others are left out.

    A rank that gave up at once would leave the others waiting in the next collective.
    """

    # Of the first that failed.
    failure: str = ""

    def attempt(self, write: Callable[[], object]) -> None:
        """Run `write`, unless one has failed already."""
        beat()
        if self.failure:
            return
        try:
            write()
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own words for a full disk
            self.failure = f"{type(error).__name__}: {error}"
