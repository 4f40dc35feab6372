"""The files of a run directory, read once, for `report`, `compare` and a model card."""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import RunError
from asyncrl.run.directory import RunDirectory
from asyncrl.run.starts import Start, read_starts
from asyncrl.telemetry.alarms import PREFIX
from asyncrl.telemetry.history import Row, growth, numbers
from asyncrl.telemetry.jsonl import Tail
from asyncrl.telemetry.state import FAULTS, LEARNER, RunView, read_state

# Lines of a generator in memory; a curve has no more points. A week has a hundred times as many.
MOST_ROWS = 1500


@dataclass(frozen=True, kw_only=True)
class Archive(RunView):
    """A run with what its generators measured over its whole time. Its config may be of another release."""

    directory: RunDirectory
    config: dict[str, Any]
    starts: list[Start]

    @property
    def name(self) -> str:
        return str(self.config.get("run", {}).get("name", self.directory.path.name))

    @cached_property
    def names(self) -> list[str]:
        return sorted(self.history.names.keys() - {"time"})

    @property
    def sections(self) -> list[dict[str, Any]]:
        """The sections of data.train, also where it is a text; its path is `?` if the run has none."""
        train = self.config.get("data", {}).get("train", "?")
        return [{"path": train}] if isinstance(train, str) else train

    @property
    def sources(self) -> list[str]:
        """The paths of data.train."""
        return [one["path"] for one in self.sections]

    @property
    def total_steps(self) -> int | None:
        """Number of steps of the whole run, by its config."""
        steps = self.config.get("learner", {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def state(self) -> str:
        """The learner's last state; it may have been killed since."""
        return self.status.state if self.status else "no status"

    @property
    def began_at(self) -> float:
        """Unix seconds of the first start; 0 if none is known."""
        return self.starts[0].time if self.starts else 0.0

    @property
    def wall_s(self) -> float:
        """Seconds from each start of the learner to its last line before the next start, summed up."""
        total_s = 0.0
        for begin, end in pairwise([*(start.time for start in self.starts), math.inf]):
            total_s += max((at for at in self.history.times if begin <= at < end), default=begin) - begin
        return total_s

    def counted(self, name: str) -> float:
        """Return the sum of a counter over all generators, each of which counts from 0 after a restart."""
        lines = (pairwise([{}, *rows]) for rows in self.generators.values())
        return sum(growth(before, now, name) for before, now in chain.from_iterable(lines))

    @property
    def faults(self) -> dict[str, float]:
        """Failures of the environments of all generators since the first start, by reason."""
        counters = {name for rows in self.generators.values() for row in rows for name in row}
        names = sorted(name for name in counters if name.startswith(FAULTS))
        return {name.removeprefix(FAULTS): self.counted(name) for name in names}

    @property
    def alarm_spans(self) -> dict[str, list[tuple[int, int]]]:
        """(first step, last step) of each time that an alarm was active, by its name."""
        found: dict[str, list[tuple[int, int]]] = {}
        for name in [name for name in self.names if name.startswith(PREFIX)]:
            for is_active, points in groupby(self.history.series(name), key=lambda point: bool(point[1])):
                steps = [step for step, _ in points]
                if is_active:
                    found.setdefault(name.removeprefix(PREFIX), []).append((steps[0], steps[-1]))
        return found


def read_archive(directory: RunDirectory) -> Archive:
    """Read a run directory. Raises RunError if its config cannot be read."""
    path, when = directory.config, "it is written when a run starts"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(f"{path} cannot be read: {error}; {when}") from error
    if not isinstance(config, dict):
        raise RunError(f"{path} holds {type(config).__name__}, not a mapping; {when}")
    files = sorted(path for path in directory.metrics.glob("*.jsonl") if path.stem != LEARNER)
    generators = {path.stem: spread_rows(path) for path in files}
    state = vars(read_state(directory.path)) | {"generators": generators}
    return Archive(**state, directory=directory, config=config, starts=read_starts(directory.starts))


def spread_rows(path: Path) -> list[Row]:
    """Return at most `MOST_ROWS` metric lines of a generator, evenly spread over its file, and some more.

    These are the last line and those before and after a restart, so counters add up as over all lines.
    """
    tail, rows, before = Tail(path), list[Row](), Row()
    apart_bytes, next_offset = path.stat().st_size / MOST_ROWS, 0.0
    for row in map(numbers, tail):
        has_restarted = bool(rows) and row.get("alive_s", 0.0) < before.get("alive_s", 0.0)
        if has_restarted and rows[-1] is not before:
            rows.append(before)
        if has_restarted or tail.offset >= next_offset:
            rows.append(row)
            next_offset = tail.offset + apart_bytes
        before = row
    return rows if not rows or rows[-1] is before else [*rows, before]
