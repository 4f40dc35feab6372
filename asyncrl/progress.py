"""Signs of progress: memory that a supervisor shares with the processes that it keeps alive.

That a process exists does not say that it gets on. So the thread that does the work says what it begins, and that it gets on
with it, here. It is memory, not a file or a message: a full disk, a full pipe or a supervisor that stands still hold up nobody.

    supervisor   board = Board(["rank 0", "rank 1"]); Popen(..., env | board.variable(0), pass_fds=[board.descriptor])
                 Watch(board, limits).look(now_s)        why one of them counts as hung
    process      attach(), then begin("train"), beat(), beat(), begin("checkpoint", Pace.SLOW), ...
"""

import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

VARIABLE = "ASYNCRL_PROGRESS"  # descriptor:place
_SIGN = struct.Struct("<QB55s")
_QUICK_S = 30.0
_LONGEST_LOOK_S = 1.0


class Pace(IntEnum):
    """How long a process may be silent."""

    NORMAL = 0
    SLOW = 1  # A model is loaded, a checkpoint written, a user's code runs
    QUICK = 2  # it only waits, and says so every second


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds of silence after which a process counts as hung."""

    hang_s: float
    slow_s: float

    def of(self, pace: Pace) -> float:
        """For one pace."""
        return {Pace.NORMAL: self.hang_s, Pace.SLOW: self.slow_s, Pace.QUICK: min(_QUICK_S, self.hang_s)}[pace]


UNLIMITED = Limits(hang_s=float("inf"), slow_s=float("inf"))


@dataclass(frozen=True, slots=True)
class Sign:
    """The last one of a process; any other one is progress."""

    count: int
    pace: Pace
    doing: str


class Board:
    """The supervisor's side: one place for each of `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.descriptor = os.memfd_create("asyncrl-progress")
        os.ftruncate(self.descriptor, _SIGN.size * len(names))
        self._memory = mmap.mmap(self.descriptor, _SIGN.size * len(names))

    def variable(self, place: int) -> dict[str, str]:
        """For the environment of the process that gets this place."""
        return variable(self.descriptor, place)

    def signs(self) -> dict[str, Sign]:
        """By name; of a process that has said nothing yet, that it starts."""
        found = {}
        for place, name in enumerate(self.names):
            count, pace, doing = _SIGN.unpack_from(self._memory, place * _SIGN.size)
            text = doing.rstrip(b"\0").decode(errors="replace")
            found[name] = Sign(count, Pace(min(pace, max(Pace))), text) if count else Sign(0, Pace.SLOW, "start")
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        os.close(self.descriptor)


def variable(descriptor: int, place: int) -> dict[str, str]:
    """As of a `Board`, for a process that passes its own descriptor on."""
    return {VARIABLE: f"{descriptor}:{place}"}


@dataclass(slots=True)
class Watch:
    """Judges the signs of a board, by a clock that its owner passes in."""

    board: Board
    limits: Limits
    _last: Mapping[str, Sign] = field(init=False, default_factory=dict)
    _since_s: dict[str, float] = field(init=False, default_factory=dict)

    def look(self, now_s: float) -> str | None:
        """Why somebody counts as hung; None when nobody does.

        While one is in a slow part, the others are not judged: they may be waiting for it.
        """
        signs = self.board.signs()
        someone_is_slow = any(sign.pace is Pace.SLOW for sign in signs.values())
        for name, sign in signs.items():
            waits = someone_is_slow and sign.pace is not Pace.SLOW
            if waits or sign != self._last.get(name):
                self._since_s[name] = now_s
        self._last = signs
        silent_s = {name: now_s - since_s for name, since_s in self._since_s.items()}
        shares = {name: silent_s[name] / self.limits.of(sign.pace) for name, sign in signs.items()}
        if max(shares.values()) <= 1.0:
            return None
        # Those that wait for the hung one fall silent at the same time; which is which the reader must judge.
        first, *others = sorted((name for name in signs if shares[name] > 0.5), key=lambda name: -silent_s[name])
        also = "".join(f"; {name}: {silent_s[name]:.0f} s in `{signs[name].doing}`" for name in others)
        return f"{first} made no progress for {silent_s[first]:.0f} s in `{signs[first].doing}`{also}"


@dataclass(slots=True)
class Attention:
    """A clock that stands still while its owner does: silence that nobody was there to hear is nobody's fault."""

    clock: Callable[[], float] = time.monotonic
    now_s: float = 0.0
    _looked_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._looked_at_s = self.clock()

    def look(self) -> float:
        """The time; it has moved by what passed since the last look, at most by a second."""
        before_s, self._looked_at_s = self._looked_at_s, self.clock()
        self.now_s += min(self._looked_at_s - before_s, _LONGEST_LOOK_S)
        return self.now_s


# --- the process's side: one place for each process, as it has one process id --------------------------------------


class _Place:
    """Where this process says that it gets on; without memory, nowhere."""

    memory: mmap.mmap | None = None
    offset = 0
    count = 0
    doing: tuple[Pace, bytes] = (Pace.SLOW, b"")


_own = _Place()


def attach() -> None:
    """Take the place that the environment names, if it names one, and begin the start."""
    descriptor = inherited()
    if descriptor is None:
        return
    _own.memory = mmap.mmap(descriptor, 0)
    _own.offset = int(os.environ[VARIABLE].partition(":")[2]) * _SIGN.size
    begin("start", Pace.SLOW)


def inherited() -> int | None:
    """The descriptor of the board on which this process has its place, to pass on."""
    value = os.environ.get(VARIABLE)
    return None if value is None else int(value.partition(":")[0])


def begin(doing: str, pace: Pace = Pace.NORMAL) -> None:
    """Say what the working thread of this process does from now on."""
    _own.doing = pace, doing.encode()[:55]
    beat()


def beat() -> None:
    """Say that the working thread of this process gets on with it."""
    if _own.memory is not None:
        _own.count += 1
        _SIGN.pack_into(_own.memory, _own.offset, _own.count, *_own.doing)
