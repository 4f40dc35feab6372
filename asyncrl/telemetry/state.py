"""The state that a dashboard shows, read from the files of a run directory by any process, also after the
run."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl.control.base import MemberStatus
from asyncrl.telemetry.alarms import ringing
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.history import History, Row, Series, Tail, numbers
from asyncrl.telemetry.notes import Note, NoteReader
from asyncrl.telemetry.status import StatusSnapshot, read_status

SAMPLES = 8  # rollouts kept for showing
SAMPLE_BYTES = 1 << 20
RECENT_ROWS = 12  # metric lines of a generator (one minute) that give its recent idle share
RECENT_STEPS = 20  # steps that give the speed for the time left, and the learner's idle share
# After this long without a step, and after the usual time of this many steps, the past speed predicts
# nothing.
STUCK_S, STUCK_STEPS = 30.0, 5.0
NOTES = 8
# Counters of the buffer that count work given up or repeated.
DROPS = ("dead", "failed", "lease_expired", "rejected_frames")


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardState:
    """A run, as its files describe it."""

    run: str
    now: float  # Unix seconds when this was read
    status: StatusSnapshot | None = None
    history: History = field(default_factory=History)
    members: tuple[MemberStatus, ...] = ()
    samples: tuple[SampleRecord, ...] = ()
    # Share of the last minute in which generators had nothing to sample; mean over generators.
    idle_generators: float | None = None
    # Share of the last minute in which they stood still for new weights.
    paused_generators: float | None = None
    notes: tuple[Note, ...] = ()  # the newest warnings and errors of all processes, the last one last
    doing: Mapping[str, str] = field(default_factory=dict)  # what each process said last of itself

    def series(self, name: str) -> Series:
        """(step, value) pairs of a learner metric."""
        return self.history.series(name)

    def latest(self, name: str) -> float | None:
        """Newest value of a learner metric."""
        return self.history.latest(name)

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self.status.step if self.status else max(self.history.rows, default=0)

    @property
    def alarms(self) -> list[str]:
        """Names of the alarms that ring, by the newest trained step."""
        newest = next(
            (step for step in reversed(self.history.steps) if "time/step" in self.history.rows[step]), 0
        )
        return ringing(self.history.rows.get(newest, {}))

    @property
    def trained_steps(self) -> list[int]:
        """Steps that have been logged, in order: not those of which only an evaluation is known."""
        return [step for step in self.history.steps if "time/step" in self.history.rows[step]]

    @property
    def idle_learner(self) -> float | None:
        """Share of the time of the last steps in which the learner had nothing to train on."""
        known = (
            row for step in reversed(self.history.steps) if "idle/learner" in (row := self.history.rows[step])
        )
        rows = list(islice(known, RECENT_STEPS))
        seconds = [row.get("time/step", 1.0) for row in rows]
        if not rows or sum(seconds) <= 0:
            return None
        return sum(row["idle/learner"] * step_s for row, step_s in zip(rows, seconds, strict=True)) / sum(
            seconds
        )

    @property
    def generated_tokens_per_s(self) -> float:
        """Sum over all generators."""
        return sum(member.metrics.get("tokens_per_s", 0.0) for member in self.members)

    @property
    def elapsed_s(self) -> float | None:
        """Seconds since the learner's process began, up to its end."""
        if self.status is None:
            return None
        return (self.status.updated_at if self.status.is_final else self.now) - self.status.started_at

    @property
    def silent_s(self) -> float:
        """Seconds since the learner last wrote its status; 0 once the run is over."""
        return (
            0.0
            if self.status is None or self.status.is_final
            else max(0.0, self.now - self.status.updated_at)
        )

    @property
    def eta_s(self) -> float | None:
        """Time left at the speed of the last steps."""
        rows = self.history.rows
        trained = (
            step for step in reversed(self.history.steps) if {"time", "time/step"} <= rows[step].keys()
        )
        recent = [(step, rows[step]["time"]) for step in islice(trained, RECENT_STEPS + 1)][::-1]
        if self.status is None or self.status.is_final or len(recent) < 2 or recent[-1][1] <= recent[0][1]:
            return None
        seconds_per_step = (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])
        if self.now - recent[-1][1] > max(STUCK_S, STUCK_STEPS * seconds_per_step):
            return None  # the run is stuck, so that speed says nothing
        return max(0, self.status.total_steps - self.step) * seconds_per_step

    @property
    def dropped(self) -> dict[str, int]:
        """Number of groups that were not trained on or were sampled again, by reason."""
        counts = Counter(self.history.rejected)
        if self.status and self.status.audit:
            counts.update(
                {name: count for name, count in self.status.audit.counters.items() if name in DROPS}
            )
        return dict(counts)


class StateReader:
    """Reads a run directory repeatedly, each time only what is new."""

    def __init__(self, directory: Path, *, since: float | None = None, without: str = "") -> None:
        """Read the run directory `directory`, which need not be complete yet.

        `since` is the start of a run that was just started: status and notes from before it are left out. The
        notes of the process `without` are left out too.
        """
        self.directory = directory
        self._since = since or 0.0
        status = None if since else read_status(directory / "status.json")
        self._note_reader = NoteReader(
            directory / "logs", since=status.started_at if status else self._since, without=without
        )
        self._notes: deque[Note] = deque(maxlen=NOTES)
        self._learner = Tail(directory / "metrics" / "learner.jsonl")
        self._samples = Tail(directory / "samples.jsonl", last_bytes=SAMPLE_BYTES)
        self._generators: dict[str, tuple[Tail, deque[Row]]] = {}
        self._history = History()
        self._recent_samples: deque[SampleRecord] = deque(maxlen=SAMPLES)

    def read(self) -> DashboardState:
        """The state now. Its history is shared with later reads and grows with them."""
        for record in self._learner.read():
            self._history.add(record)
        self._recent_samples.extend(sample_from(record) for record in self._samples.read())
        status = read_status(self.directory / "status.json")
        if status and status.started_at < self._since:
            status = None
        self._notes.extend(self._note_reader.read())
        for path in sorted((self.directory / "metrics").glob("*.jsonl")):
            if path.name != "learner.jsonl" and path.stem not in self._generators:
                self._generators[path.stem] = (Tail(path), deque(maxlen=RECENT_ROWS))
        for tail, recent in self._generators.values():
            recent.extend(map(numbers, tail.read()))
        rows = {name: recent for name, (_, recent) in self._generators.items()}
        members = _members(status, rows)
        alive = [rows[member.generator_id] for member in members if member.generator_id in rows]
        return DashboardState(
            run=status.run if status else self.directory.name,
            now=time.time(),
            status=status,
            history=self._history,
            members=members,
            samples=tuple(self._recent_samples),
            idle_generators=_mean_share(alive, "idle_s"),
            paused_generators=_mean_share(alive, "paused_s"),
            notes=tuple(self._notes),
            doing=dict(self._note_reader.doing),
        )


def read_state(directory: Path) -> DashboardState:
    """The state of a run directory now; empty as far as files are missing."""
    return StateReader(directory).read()


def sample_from(record: Mapping[str, Any]) -> SampleRecord:
    """A rollout from its JSON object. Null becomes NaN, unknown fields are left out."""
    known = {
        item.name: record[item.name] for item in fields(SampleRecord) if record.get(item.name) is not None
    }
    nothing = {
        "step": 0,
        "ticket_id": 0,
        "prompt": "",
        "response": "",
        "reward": math.nan,
        "parts": {},
        "advantage": math.nan,
    }
    return SampleRecord(**{**nothing, "versions": (), "finish_reason": "", "generator_id": "", **known})


def _members(status: StatusSnapshot | None, rows: Mapping[str, deque[Row]]) -> tuple[MemberStatus, ...]:
    """The generators in the learner's status; before it writes one, those that write metrics."""
    if status is not None:
        return tuple(
            replace(member, metrics={**_last(rows.get(member.generator_id)), **member.metrics})
            for member in status.members
        )
    return tuple(
        MemberStatus(generator_id=name, state="unknown", version=0, silent_s=0.0, metrics=_last(lines))
        for name, lines in rows.items()
    )


def _last(rows: deque[Row] | None) -> Row:
    return rows[-1] if rows else {}


def _mean_share(generators: Iterable[deque[Row]], name: str) -> float | None:
    """Mean over generators of the growth of a counter of seconds per second alive, over the recent lines."""
    shares = []
    for lines in generators:
        if not lines or "alive_s" not in lines[-1]:
            continue
        newest, oldest = lines[-1], lines[0]
        restarted = newest["alive_s"] <= oldest.get("alive_s", 0.0)
        since = {} if restarted else oldest
        alive_s = newest["alive_s"] - since.get("alive_s", 0.0)
        if alive_s > 0:
            shares.append(min(1.0, max(0.0, (newest.get(name, 0.0) - since.get(name, 0.0)) / alive_s)))
    return sum(shares) / len(shares) if shares else None
