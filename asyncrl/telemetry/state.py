"""The state that a dashboard shows, read from the files of a run directory, during the run or later."""

import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.control.base import MemberStatus
from asyncrl.files import read_record
from asyncrl.telemetry.alarms import ringing
from asyncrl.telemetry.base import SampleRecord, sample_from
from asyncrl.telemetry.history import History, Row, growth_share, numbers
from asyncrl.telemetry.jsonl import Tail, Tails
from asyncrl.telemetry.status import StatusSnapshot, read_status

LEARNER = "learner"  # the process whose metrics are by step
SAMPLES = 8  # rollouts kept for showing
SAMPLE_BYTES = 1 << 20
RECENT_ROWS = 12  # metric lines of a generator (one minute) that give its recent idle share
RECENT_STEPS = 20  # steps that give the speed for the time left, and the learner's idle share
# Seconds and usual times of a step without a new step: after both, the past speed predicts nothing.
STUCK_S, STUCK_STEPS = 30.0, 5.0
NOTES = 8
ALLOCATED, PLANNED = "memory/allocated_bytes/", "memory/planned_bytes/"  # of a rank
# Counters of the buffer for attempts that failed; dead tickets are among the groups that steps rejected.
DROPS = ("failed", "lease_expired", "rejected_frames")
FAULTS = "environment_faults_"  # of a generator, by reason
# Read at most this much of a log, or of the metrics of a generator, that exists already.
NEWEST_BYTES = 1 << 16
LOUD = ("warning", "error", "critical")
# Loggers of our modules, some of which are started with -m. Many warnings of libraries are harmless here.
OWN = ("asyncrl", "__main__")
BEGINS = re.compile(r"log of process \d+ begins")
LONGEST_NOTE = 600


@dataclass(frozen=True, slots=True)
class Note:
    """One line of a log."""

    at: float  # Unix seconds
    process: str
    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.process}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run, as its files describe it."""

    run: str
    now: float  # Unix seconds when this was read
    status: StatusSnapshot | None = None
    history: History = field(default_factory=History)  # metrics of the learner
    members: tuple[MemberStatus, ...] = ()
    generators: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """Metric lines of each generator: those of the last minute, in an archive some of the whole run."""
    samples: tuple[SampleRecord, ...] = ()
    # Shares of the last minute in which generators had nothing to sample, in which they were paused for new
    # weights, and in which they were paused or could only wait for these; means over generators.
    idle_generators: float | None = None
    paused_generators: float | None = None
    stalled_generators: float | None = None
    notes: tuple[Note, ...] = ()  # newest warnings and errors of all processes, the newest one last
    doing: Mapping[str, str] = field(default_factory=dict)  # newest info line of each process
    # Phase and why of `HostState`, by name.
    hosts: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def is_stage(self) -> bool:
        """Whether TRL trains on given data, so that there are no generators."""
        return self.status is not None and self.status.lag_bound is None

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self.status.step if self.status else max(self.history.rows, default=0)

    @property
    def alarms(self) -> list[str]:
        """Names of the alarms that are active in the newest trained step."""
        return ringing(next(reversed(self.recent("time/step")), {}))

    def recent(self, name: str) -> list[Row]:
        """Return the newest steps with a metric, ascending: one more than `RECENT_STEPS`, or all."""
        newest_first = (self.history.rows[step] for step in reversed(self.history.steps))
        return [*islice((row for row in newest_first if name in row), RECENT_STEPS + 1)][::-1]

    def of_start(self, name: str) -> list[Row]:
        """Return those of `recent` that the learner's process has made: after a resume, none of before."""
        began_at = self.status.started_at if self.status else 0.0
        return [row for row in self.recent(name) if row.get("time", -1.0) >= began_at]

    @property
    def idle_learner(self) -> float | None:
        """Share of the time of the last steps since the start in which the learner had nothing to train on.

        The first step is left out: the learner waited for the generators to start.
        """
        rows = self.of_start("idle/learner")[1:]
        shares = [(row["idle/learner"], row.get("time/step", 1.0)) for row in rows]
        total_s = sum(step_s for _, step_s in shares)
        return sum(share * step_s for share, step_s in shares) / total_s if total_s > 0 else None

    @property
    def fullest_gpu(self) -> tuple[float, float] | None:
        """Bytes that torch had allocated at most in the newest step, and those planned, on the learner's GPU
        where the first is largest."""
        row = next(reversed(self.recent("time/step")), Row())
        ranks = (name.removeprefix(ALLOCATED) for name in row if name.startswith(ALLOCATED))
        return max(((row[ALLOCATED + rank], row.get(PLANNED + rank, 0.0)) for rank in ranks), default=None)

    @property
    def generated_tokens_per_s(self) -> float:
        """Speed of all generators together."""
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
        # A stage writes its status after a step, which may take minutes.
        if self.status is None or self.status.is_final or self.is_stage:
            return 0.0
        return max(0.0, self.now - self.status.updated_at)

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the speed of the last steps; None if that is not known, or the run is stuck.

        Steps before a resume do not count, nor does the slowest step: the first ones compile and warm up.
        """
        rows = self.of_start("time/step")
        pairs = ((after["time"] - before["time"], after["time/step"]) for before, after in pairwise(rows))
        took_s = sorted(pairs)[:-1]
        if self.status is None or self.status.is_final or not took_s:
            return None
        row_s, step_s = map(fmean, zip(*took_s, strict=True))
        if row_s <= 0 or self.now - rows[-1]["time"] > max(STUCK_S, STUCK_STEPS * row_s):
            return None
        # A stage writes a row after several steps (`trl.logging_steps`), with the mean time of one.
        return max(0, self.status.total_steps - self.step) * (step_s if self.is_stage else row_s)

    @property
    def dropped(self) -> dict[str, int]:
        """Number of groups that were not trained on or were sampled again, by reason."""
        booked = self.status.audit.counters if self.status and self.status.audit else {}
        counts = Counter(self.history.rejected)
        counts.update({name: count for name, count in booked.items() if name in DROPS})
        return dict(counts)

    @property
    def faults(self) -> dict[str, float]:
        """Failures of the environments of all generators since their start, by reason."""
        counts: Counter[str] = Counter()
        for member in self.members:
            found = {name: count for name, count in member.metrics.items() if name.startswith(FAULTS)}
            counts.update({name.removeprefix(FAULTS): count for name, count in found.items()})
        return dict(counts)


def _note(record: Mapping[str, Any]) -> Note | None:
    """Return the line of a log as a note; None for lines of libraries."""
    try:
        at = datetime.fromisoformat(str(record["time"])).timestamp()
        logger, process, level, text = (str(record[name]) for name in ("logger", "process", "level", "event"))
    except (KeyError, ValueError):
        return None
    if logger.partition(".")[0] not in OWN or record.get("rank"):  # all ranks log alike: rank 0 is enough
        return None
    cause = str(record.get("exception") or "").strip().rpartition("\n")[2]
    return Note(at, process, level, (f"{text}: {cause}" if cause else text)[:LONGEST_NOTE])


class RunReader:
    """Reads a run directory repeatedly, each time only what is new."""

    def __init__(self, directory: Path, *, since: float | None = None, without: str = "") -> None:
        """Read `directory`, which need not be complete yet. The notes of the process `without` are left out.

        `since` is the start of a run that was just started: status and notes from before it are left out.
        Of generators and logs only the newest lines are read: a long run has gigabytes of them.
        """
        self.directory = directory
        status = read_status(directory / "status.json")
        self._before = status.started_at if status and since else None
        self._notes_since = since or (status.started_at if status else 0.0)
        self._logs = Tails(directory / "logs", last_bytes=NEWEST_BYTES, without=[without])
        self._notes: deque[Note] = deque(maxlen=NOTES)
        self._doing: dict[str, str] = {}
        self._steps = Tail(directory / "metrics" / f"{LEARNER}.jsonl")
        self._metrics = Tails(directory / "metrics", last_bytes=NEWEST_BYTES, without=[LEARNER])
        self._samples = Tail(directory / "samples.jsonl", last_bytes=SAMPLE_BYTES)
        self._generators: dict[str, deque[Row]] = {}
        self._history = History()
        self._recent_samples: deque[SampleRecord] = deque(maxlen=SAMPLES)

    def read(self) -> RunView:
        """Return the state now. Its history is shared with later reads and grows with them."""
        for record in self._steps:
            self._history.add(record)
        for name, records in self._metrics.read().items():
            rows = self._generators.setdefault(name, deque(maxlen=RECENT_ROWS))
            rows.extend(map(numbers, records))
        self._recent_samples.extend(map(sample_from, self._samples))
        status = read_status(self.directory / "status.json")
        if status and status.started_at == self._before:
            status = None
        lines = [_note(record) for records in self._logs.read().values() for record in records]
        new = [note for note in lines if note and note.at >= self._notes_since]
        for note in sorted(new, key=lambda note: note.at):
            if note.level == "info":
                self._doing[note.process] = BEGINS.sub("starting", note.text)
            elif note.level in LOUD:
                self._notes.append(note)
        members = _members(status, self._generators)
        alive = [self._generators.get(member.generator_id, ()) for member in members]
        hosts = (read_record(self.directory / "hosts.json") or {}).items()
        known = {name: host for name, host in hosts if isinstance(host, dict)}
        return RunView(
            run=status.run if status else self.directory.name,
            now=time.time(),
            status=status,
            history=self._history,
            members=members,
            generators=self._generators,
            samples=tuple(self._recent_samples),
            idle_generators=_mean_share(alive, "idle_s"),
            paused_generators=_mean_share(alive, "paused_s"),
            stalled_generators=_mean_share(alive, "stalled_s"),
            notes=tuple(self._notes),
            doing=dict(self._doing),
            hosts={name: (str(one.get("phase")), str(one.get("why") or "")) for name, one in known.items()},
        )


def read_state(directory: Path) -> RunView:
    """Return the state of a run directory now; empty as far as files are missing."""
    return RunReader(directory).read()


def _members(status: StatusSnapshot | None, rows: Mapping[str, Sequence[Row]]) -> tuple[MemberStatus, ...]:
    """Return the generators in the learner's status; before it writes one, those that write metrics."""
    unknown: dict[str, Any] = {"state": "unknown", "version": 0, "silent_s": 0.0, "metrics": {}}
    members = status.members if status else [MemberStatus(generator_id=name, **unknown) for name in rows]
    last = {name: lines[-1] if lines else {} for name, lines in rows.items()}
    return tuple(replace(one, metrics={**last.get(one.generator_id, {}), **one.metrics}) for one in members)


def _mean_share(generators: Iterable[Sequence[Row]], name: str) -> float | None:
    """Return the mean over generators of `growth_share` over the recent lines."""
    found = (growth_share(lines[0], lines[-1], name) for lines in generators if lines)
    shares = [share for share in found if share is not None]
    return sum(shares) / len(shares) if shares else None
