"""Metrics and samples as JSON lines, which any tool can read; a crash loses the last line at most."""

import errno
import json
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from asyncrl.best_effort import BestEffort
from asyncrl.telemetry.base import SampleRecord

log = logging.getLogger(__name__)

WAITING = 1000  # lines that are kept while their file cannot be written


class JsonlTracker:
    """One object per line: `{"step": 3, "time": 1.7e9, "reward/mean": 0.5, ...}`; generators write `"step":
    null`.

    JSON has no NaN and no infinity. Such a value becomes null, and `nonfinite` counts them by name.
    """

    def __init__(self, metrics: Path, samples: Path | None = None) -> None:
        """Append metrics to the file `metrics` and, if it is given, rollouts to the file `samples`."""
        self._metrics = Lines(metrics)
        self._samples = Lines(samples) if samples else None
        self._nonfinite: Counter[str] = Counter()

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Write one line and flush it."""
        values = {name: finite(value) for name, value in metrics.items()}
        self._nonfinite.update(name for name, value in values.items() if value is None)
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3), **values}
        if self._nonfinite:
            record["nonfinite"] = dict(self._nonfinite)
        self._metrics.write([record])

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Write one line for each rollout."""
        if self._samples:
            self._samples.write([to_json(asdict(record)) for record in records])

    def close(self) -> None:
        """Close the files."""
        for lines in (self._metrics, self._samples):
            if lines:
                lines.close()


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
    """A file of JSON lines. While it cannot be written (a full disk), the newest lines wait in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._may_fail = BestEffort()
        self.write([])

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append one line for each record, after the waiting ones. Never raises OSError."""
        # ensure_ascii stays on: lone surrogates (half an emoji from a tokenizer) become escapes.
        self._waiting.extend(json.dumps(record, allow_nan=False).encode() + b"\n" for record in records)
        while len(self._waiting) > WAITING:
            self._waiting.popleft()
            self._lost += 1
        with self._may_fail(f"writing {self._path}"):
            self._flush()

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        try:
            if self._file and not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                self.close()
        except OSError:  # the file has been deleted
            self.close()
        try:
            self._file = self._file or _open(self._path)
            data = b"".join(self._waiting)
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            self.close()  # the file may end within a line, which opening it repairs
            raise
        self._waiting.clear()
        if self._lost:
            message = "%s lacks %d lines: only %d could wait until it was written again"
            log.warning(message, self._path, self._lost, WAITING)
            self._lost = 0


def _open(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+", buffering=0)
    # A killed process may have left half a line: end it, so that the next line starts on its own.
    if file.tell() > 0:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file
