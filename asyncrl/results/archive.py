"""What a run directory holds, read once: for `report`, `compare`, `analyze` and a model card. Also while the run goes on."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import RunError
from asyncrl.run.directory import RunDirectory
from asyncrl.run.starts import Start, read_starts
from asyncrl.telemetry.alarms import PREFIX
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.history import History, Row, Series, Tail
from asyncrl.telemetry.state import sample_from
from asyncrl.telemetry.status import StatusSnapshot, read_status

LEARNER = "learner"


@dataclass(frozen=True)
class Archive:
    """A run as far as its files tell. Needs neither its processes nor a config that this release would accept."""

    directory: RunDirectory
    config: dict[str, Any]
    status: StatusSnapshot | None
    history: History
    # Unix seconds of every line of the learner's, also of steps that a resume did again.
    learner_times: list[float]
    generators: dict[str, list[Row]]  # lines of each generator
    starts: list[Start] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the run."""
        return str(self.config.get("run", {}).get("name", self.directory.path.name))

    def series(self, name: str) -> Series:
        """(step, value) of a learner metric."""
        return self.history.series(name)

    @cached_property
    def names(self) -> list[str]:
        """Of all learner metrics."""
        return sorted({name for row in self.history.rows.values() for name in row if name != "time"})

    @property
    def step(self) -> int:
        """Last trained step."""
        return max((step for step, row in self.history.rows.items() if "time/step" in row), default=0)

    @property
    def total_steps(self) -> int | None:
        """As the config says."""
        steps = self.config.get("learner", {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def state(self) -> str:
        """As the learner said last; it may have been killed since."""
        return self.status.state if self.status else "no status"

    @property
    def wall_s(self) -> float:
        """Seconds from each start of the learner to its last line, added up: pauses between them are left out."""
        times = self.learner_times
        total_s = 0.0
        for begin, end in pairwise([*(start.time for start in self.starts), math.inf]):
            total_s += max((time for time in times if begin <= time < end), default=begin) - begin
        return total_s

    @property
    def trained_tokens(self) -> float:
        """Action tokens of all trained steps."""
        return sum(value for _, value in self.series("tokens"))

    @property
    def sampled_tokens(self) -> float:
        """By all generators; each counts from its own start, so growth is added up."""
        total = 0.0
        for rows in self.generators.values():
            counts = [row.get("sampled_tokens", 0.0) for row in rows]
            total += sum(now - before if now >= before else now for before, now in zip([0.0, *counts], counts, strict=False))
        return total

    @property
    def alarms(self) -> dict[str, list[tuple[int, int]]]:
        """(first step, last step) of each time that an alarm rang."""
        found: dict[str, list[tuple[int, int]]] = {}
        for name in [name for name in self.names if name.startswith(PREFIX)]:
            spans: list[tuple[int, int]] = []
            was_ringing = False
            for step, value in self.series(name):
                if value and was_ringing:
                    spans[-1] = (spans[-1][0], step)
                elif value:
                    spans.append((step, step))
                was_ringing = bool(value)
            if spans:
                found[name.removeprefix(PREFIX)] = spans
        return found

    def samples(self) -> Iterator[SampleRecord]:
        """See `read_samples`."""
        return read_samples(self.directory.samples)


def read_samples(path: Path) -> Iterator[SampleRecord]:
    """Rollouts in the order in which they were written, one at a time: the file may be large. None while there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if (record := _parse(line)) is not None:
                yield sample_from(record)


def learner_records(directory: RunDirectory) -> list[dict[str, Any]]:
    """What the learner logged, a line for each time; a resume may log a step again. Empty before its first line."""
    return Tail(directory.metrics / f"{LEARNER}.jsonl").read()


def read_archive(directory: RunDirectory) -> Archive:
    """Raises RunError when the files cannot be of a run."""
    history, times = History(), []
    for record in learner_records(directory):
        history.add(record)
        if isinstance(record.get("time"), (int, float)):
            times.append(float(record["time"]))
    return Archive(
        directory=directory,
        config=_config(directory.config),
        status=read_status(directory.status),
        history=history,
        learner_times=times,
        generators={
            path.stem: [_numbers(record) for record in Tail(path).read()]
            for path in sorted(directory.metrics.glob("*.jsonl"))
            if path.stem != LEARNER
        },
        starts=read_starts(directory.starts),
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RunError(f"{path} cannot be read: {error}; it is written when a run starts") from error
    if not isinstance(values, dict):
        raise RunError(f"{path} holds {type(values).__name__}, not a mapping; it is written when a run starts")
    return values


def _parse(line: bytes) -> dict[str, Any] | None:
    """None for a line that a crash has torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _numbers(record: Mapping[str, Any]) -> Row:
    return {name: value for name, value in record.items() if isinstance(value, (int, float))}
