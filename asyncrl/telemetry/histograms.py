"""Distributions among metrics: `NAME/3` is how much of it lies at 3. Files keep them as they are, trackers can draw them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

BIN = re.compile(r"(?P<name>.+)/(?P<at>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Weights of the values 0, 1, 2, ...; bin i reaches from i to i + 1."""

    counts: tuple[float, ...]

    @property
    def edges(self) -> tuple[float, ...]:
        """One more than `counts`."""
        return tuple(map(float, range(len(self.counts) + 1)))


def split(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, Histogram]]:
    """(plain numbers, distributions by name) of what was logged."""
    numbers: dict[str, float] = {}
    bins: dict[str, dict[int, float]] = {}
    for name, value in metrics.items():
        if found := BIN.fullmatch(name):
            bins.setdefault(found["name"], {})[int(found["at"])] = float(value)
        else:
            numbers[name] = value
    return numbers, {
        f"{name}/histogram": Histogram(counts=tuple(at.get(index, 0.0) for index in range(max(at) + 1)))
        for name, at in bins.items()
    }
