"""JSON lines, which any tool can read: how all files of a run are written, and read while they grow."""

import contextlib
import errno
import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from asyncrl.best_effort import BestEffort
from asyncrl.files import tell_unreadable

log = logging.getLogger(__name__)

WAITING = 1000  # lines that are kept while their file cannot be written


def finite(value: float) -> float | None:
    """Return a plain number, also from numpy and torch; None for NaN and infinity."""
    number = float(value)
    return number if math.isfinite(number) else None


def to_json(value: Any) -> Any:
    """Return the value as JSON can hold it: None for NaN and infinity, strings for types that JSON lacks."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, (str, int)) else str(value)


class Lines:
    """A file of JSON lines. While it cannot be written (a full disk), the newest lines wait in memory.

    A killed process may have left half a line, which opening the file repairs.
    """

    def __init__(self, path: Path, *, opening: bytes = b"", end: bytes = b"\n") -> None:
        """Append to the file `path`, in which every line has this `end`.

        With an `opening` the lines are items of an array, so half a line is removed. Without, it gets an
        end: another process may be writing it.
        """
        self._path, self._opening, self._end = path, opening, end
        self._file: IO[bytes] | None = None
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._may_fail = BestEffort()
        self.write([])

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append a line for each record, after the waiting ones. Never raises OSError."""
        with self._may_fail(f"writing {self._path}"):
            # ensure_ascii stays on: lone surrogates (half an emoji from a tokenizer) become escapes.
            self.put(*(json.dumps(record, allow_nan=False) for record in records))

    def put(self, *lines: str) -> None:
        """Append lines as they are, after the waiting ones. On OSError they wait, too."""
        self._waiting.extend(line.encode() + self._end for line in lines)
        while len(self._waiting) > WAITING:
            self._waiting.popleft()
            self._lost += 1
        try:
            if self._file and not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                self.close()
        except OSError:  # the file has been deleted
            self.close()
        try:
            self._file = self._file or _open(self._path, self._opening, self._end)
            written = self._file.write(b"".join(self._waiting))
            while self._waiting and written >= len(self._waiting[0]):
                written -= len(self._waiting.popleft())
            if self._waiting:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            self.close()
            raise
        if lost := self._lost:
            self._lost = 0  # first, as this file may be that of the log
            message = "%s lacks %d lines: only %d could wait until it was written again"
            log.warning(message, self._path, lost, WAITING)

    @property
    def size(self) -> int:
        """Bytes of the file; 0 while it cannot be written."""
        return self._file.tell() if self._file else 0

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def _open(path: Path, opening: bytes, end: bytes) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+", buffering=0)
    if opening:
        file.seek(0)
        whole = file.read().rfind(end) + len(end)
        if whole < len(opening + end):
            file.truncate(0)
            file.write(opening)
        else:
            file.truncate(whole)
    elif file.tell() > 0:
        file.seek(-1, 2)
        if file.read(1) != end:
            file.write(end)
    return file


class Tail:
    """Reads a growing file of JSON lines: each time the complete lines added since the last time."""

    def __init__(self, path: Path, *, last_bytes: int | None = None) -> None:
        """Start at the beginning, or at the first line of the `last_bytes` before the end."""
        self.path = path
        self._inode, size = self._found()
        skipped_bytes = 0 if last_bytes is None else max(0, size - last_bytes)
        # Behind what was read. The byte before the last ones tells whether they begin with a whole line.
        self.offset = max(0, skipped_bytes - 1)
        self._inside_line = skipped_bytes > 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the objects written since the last time. A file that has shrunk is read again from 0.

        So is another file of this name, as after a rotation.
        """
        inode, size = self._found()
        if size < self.offset or inode != self._inode:
            self._inode, self.offset, self._inside_line = inode, 0, False
        if size == self.offset:
            return
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self.offset += len(line)
                    was_inside, self._inside_line = self._inside_line, False
                    if was_inside or line == b"\n":
                        continue
                    record = None
                    with contextlib.suppress(ValueError):  # a crash may have cut it off
                        record = json.loads(line)
                    if isinstance(record, dict):
                        yield record
        except OSError as error:
            tell_unreadable(self.path, error)

    def _found(self) -> tuple[int, int]:
        """Return (inode, bytes) of the file; zeros without one."""
        try:
            found = self.path.stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_size


class Tails:
    """A `Tail` for each `*.jsonl` of a directory, also for those that appear later."""

    def __init__(
        self, directory: Path, *, last_bytes: int | None = None, without: Sequence[str] = ()
    ) -> None:
        """Leave out the files `without`, by their names before `.jsonl`."""
        self._directory, self._last_bytes, self._without = directory, last_bytes, without
        self._tails: dict[str, Tail] = {}

    def read(self) -> Mapping[str, Tail]:
        """Return what yields the new lines of each file, by its name before `.jsonl`."""
        for path in sorted(self._directory.glob("*.jsonl")):
            if path.stem not in (*self._without, *self._tails):
                self._tails[path.stem] = Tail(path, last_bytes=self._last_bytes)
        return self._tails
