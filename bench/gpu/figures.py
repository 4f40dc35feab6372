"""What a row of the check has measured: figures with their limits, and verdicts that follow from these."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl.engine.base import Device

# `rehearsed` is a speed on a CPU, where no limit applies; `noted` has no limit; `absent` was not measured.
Verdict = Literal["ok", "failed", "rehearsed", "noted", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number with its limit, or a text."""

    name: str
    verdict: Verdict
    value: float | None = None
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def limit(self) -> str:
        """The limit as text; empty without one."""
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return f"at most {self.at_most:g}" if self.at_most is not None else ""


def noted(name: str, value: float | None = None, unit: str = "", *, note: str = "") -> Figure:
    """Return a figure without a limit."""
    return Figure(name=name, verdict="noted", value=value, unit=unit, note=note)


def absent(name: str, note: str) -> Figure:
    """Return a figure that this machine or device does not have."""
    return Figure(name=name, verdict="absent", note=note)


def judged(
    name: str,
    value: float,
    unit: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Figure:
    """Return a figure with the verdict that its limit gives; NaN is within no limit."""
    is_fine = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    return Figure(
        name=name,
        verdict="ok" if is_fine else "failed",
        value=value,
        unit=unit,
        at_least=at_least,
        at_most=at_most,
        note=note,
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a check runs, and on what. Every row finds it in the directory of the check."""

    directory: Path
    device: Device
    model: str

    @classmethod
    def read(cls, directory: Path) -> "Place":
        """Read what `write` has written."""
        plain = json.loads((directory / "place.json").read_text())
        return cls(directory, plain["device"], plain["model"])

    def write(self) -> None:
        """Leave it for the processes of the rows."""
        plain = {"device": self.device, "model": self.model}
        (self.directory / "place.json").write_text(json.dumps(plain))

    @property
    def on_gpu(self) -> bool:
        """Whether this is the check itself and not its rehearsal."""
        return self.device == "cuda"

    def speed(self, name: str, value: float, unit: str = "", **limit: Any) -> Figure:
        """Return a figure that says nothing about a CPU, where its limit is only shown."""
        figure = judged(name, value, unit, **limit)
        return figure if self.on_gpu else Figure(**asdict(figure) | {"verdict": "rehearsed"})


def append(file: Path, figure: Figure) -> None:
    """Write a figure to disk, where it stays if the row ends badly afterwards."""
    with file.open("a") as opened:
        opened.write(json.dumps(asdict(figure)) + "\n")


def figures_in(file: Path) -> Iterator[Figure]:
    """Yield the figures of a row; the last line may be half written."""
    text = file.read_text() if file.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        yield Figure(**json.loads(line))


def value_in(file: Path, name: str) -> float | None:
    """Return a value that an earlier row has measured, or None."""
    return next((figure.value for figure in figures_in(file) if figure.name == name), None)
