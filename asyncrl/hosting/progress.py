"""Heartbeats of processes, in memory that they share with their supervisor.

A process can exist and still hang. So the thread that does the work reports here what it begins and that it
makes progress. Shared memory, unlike a file or a message, can never block the process: not on a full disk, a
full pipe or a stopped supervisor.

    supervisor   board = Board(["rank 0", "rank 1"])
                 Popen(..., env | variable(board.descriptor, 0), pass_fds=[board.descriptor])
                 Watch(board.signs, limits).look(now_s)  why a process counts as hung, or None
    process      attach(), then begin("train"), beat(), beat(), begin("checkpoint", Pace.SLOW), ...
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Self

from asyncrl.config.sections import ControlConfig

VARIABLE = "ASYNCRL_PROGRESS"  # its value is "descriptor:place"
_SIGN = struct.Struct("<QB55s")
_QUICK_S = 30.0


class Pace(IntEnum):
    """How long a process may be silent."""

    NORMAL = 0
    SLOW = 1  # it loads a model, writes a checkpoint, or runs a user's code
    OVER = 2  # its work is done: it waits for the end of others, or has ended
    QUICK = 3  # it only waits, and reports every second


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds of silence after which a process counts as hung."""

    hang_s: float
    slow_s: float

    @classmethod
    def of(cls, control: ControlConfig) -> Self:
        return cls(hang_s=control.hang_s, slow_s=control.slow_s)

    def at(self, pace: Pace) -> float:
        return (self.hang_s, self.slow_s, float("inf"), min(_QUICK_S, self.hang_s))[pace]


UNLIMITED = Limits(hang_s=float("inf"), slow_s=float("inf"))


@dataclass(frozen=True, slots=True)
class Sign:
    """The last report of a process. A different report means progress."""

    count: int
    pace: Pace
    doing: str


class Board:
    """The supervisor's side of the memory: one place for each of `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.descriptor = os.memfd_create("asyncrl-progress")
        os.ftruncate(self.descriptor, _SIGN.size * len(names))
        self._memory = mmap.mmap(self.descriptor, _SIGN.size * len(names))

    def signs(self) -> dict[str, Sign]:
        """Return the last sign of each process, by name. A process without a report counts as starting."""
        found = {}
        for name, (count, pace, doing) in zip(self.names, _SIGN.iter_unpack(self._memory), strict=True):
            text = doing.rstrip(b"\0").decode(errors="replace")
            sign = Sign(count, Pace(min(pace, max(Pace))), text)
            found[name] = sign if count else Sign(0, Pace.SLOW, "start")
        return found

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


def variable(descriptor: int, place: int) -> dict[str, str]:
    """Return the environment variable that gives a process its place on the board `descriptor`."""
    return {VARIABLE: f"{descriptor}:{place}"}


@dataclass(slots=True)
class Watch:
    """Judges the signs of processes by a clock that the caller passes in."""

    read: Callable[[], Mapping[str, Sign]]  # returns the last sign of each process, by name
    limits: Limits
    _last: Mapping[str, Sign] = field(init=False, default_factory=dict)
    _since_s: dict[str, float] = field(init=False, default_factory=dict)

    def look(self, now_s: float) -> str | None:
        """Say why a process counts as hung, or None. While one is in a slow part, others may wait for it."""
        signs = self.read()
        someone_is_slow = any(sign.pace is Pace.SLOW for sign in signs.values())
        for name, sign in signs.items():
            waits = someone_is_slow and sign.pace is not Pace.SLOW
            if waits or sign != self._last.get(name):
                self._since_s[name] = now_s
        self._last = signs
        silent_s = {name: now_s - since_s for name, since_s in self._since_s.items()}
        shares = {name: silent_s[name] / self.limits.at(sign.pace) for name, sign in signs.items()}
        if max(shares.values()) <= 1.0:
            return None
        # Processes that wait for the hung one fall silent at the same time, so the message names all of them.
        silent = [name for name in signs if shares[name] > 0.5]
        first, *others = sorted(silent, key=lambda name: -silent_s[name])
        also = "".join(f"; {name}: {silent_s[name]:.0f} s in `{signs[name].doing}`" for name in others)
        return f"{first} made no progress for {silent_s[first]:.0f} s in `{signs[first].doing}`{also}"


@dataclass(slots=True)
class Attention:
    """A clock that stops while its owner is stopped: silence during that time does not count."""

    clock: Callable[[], float] = lambda: time.monotonic()
    now_s: float = 0.0
    longest_s: float = 1.0  # from one look to the next while the owner runs
    _looked_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._looked_at_s = self.clock()

    def look(self) -> float:
        """Return the time, which advances at most by `longest_s` between two looks."""
        before_s, self._looked_at_s = self._looked_at_s, self.clock()
        self.now_s += min(self._looked_at_s - before_s, self.longest_s)
        return self.now_s


# --- the process's side: one place for each process, as it has one process id ---------------------


class _Place:
    """The place of this process; without memory, reports go nowhere."""

    memory: mmap.mmap | None = None
    offset = 0
    count = 0
    doing: tuple[Pace, bytes] = (Pace.SLOW, b"")


_own = _Place()


def attach() -> None:
    """Take the place that the environment names, if any, and report that the process starts."""
    descriptor = inherited()
    if descriptor is None:
        return
    _own.memory = mmap.mmap(descriptor, 0)
    _own.offset = int(os.environ[VARIABLE].partition(":")[2]) * _SIGN.size
    begin("start", Pace.SLOW)


def inherited() -> int | None:
    """Return the descriptor of the board on which this process has a place, to pass on; None without one."""
    value = os.environ.get(VARIABLE)
    return None if value is None else int(value.partition(":")[0])


def begin(doing: str, pace: Pace = Pace.NORMAL) -> None:
    """Report what the main thread, which does the work, does from now on."""
    if _is_main():
        _own.doing = pace, doing.encode()[:55]
        beat()


def doing() -> str:
    """Return what `begin` reported last."""
    return _own.doing[1].decode(errors="ignore")


def beat() -> None:
    """Report that the main thread makes progress. Another thread, such as that of exports, has no say."""
    if _is_main():
        _report()


@contextmanager
def while_growing(doing: str, directory: Path, every_s: float = 1.0) -> Iterator[None]:
    """Begin with a slow part that a library writes below `directory`; progress is that files there change."""
    begin(doing, Pace.SLOW)
    is_done = threading.Event()

    def look() -> None:
        before = 0
        while not is_done.wait(every_s):
            with suppress(OSError):  # of a file that is renamed or removed in the meantime
                stats = [path.lstat() for path in directory.rglob("*")]
                # Some libraries give a file its whole size first.
                found = sum(stat.st_size + stat.st_blocks for stat in stats)
                if found != before:
                    _report()
                before = found

    looking = threading.Thread(target=look, name="growth", daemon=True)
    looking.start()
    try:
        yield
    finally:
        is_done.set()
        looking.join()


def _report() -> None:
    if _own.memory is not None:
        _own.count += 1
        _SIGN.pack_into(_own.memory, _own.offset, _own.count, *_own.doing)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
