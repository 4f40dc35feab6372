"""The pause before something that failed is tried again. The caller counts failures and owns the clock."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """The first pause, doubled with each further failure, up to the longest."""

    first_s: float
    longest_s: float

    def pause_s(self, failures: int) -> float:
        """Return the pause after `failures` failures in a row, one or more."""
        return min(self.first_s * 2.0 ** min(failures - 1, 60), self.longest_s)
