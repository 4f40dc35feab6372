"""Metrics and samples as JSON lines: always written, readable with any tool, whole after a crash up to the last line."""

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from asyncrl.telemetry.base import SampleRecord


class JsonlTracker:
    """One object a line: `{"step": 3, "time": 1.7e9, "reward/mean": 0.5, ...}`; generators have `"step": null`.

    JSON has no NaN and no infinity: such a value is null, and `nonfinite` counts how often each name had one so far.
    """

    def __init__(self, metrics: Path, samples: Path | None = None) -> None:
        """Append to the file `metrics`; and rollouts to the file `samples`, if this process has any."""
        self._metrics = _open(metrics)
        self._samples = _open(samples) if samples else None
        self._nonfinite: Counter[str] = Counter()

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Write one line and flush it."""
        values = {name: finite(value) for name, value in metrics.items()}
        self._nonfinite.update(name for name, value in values.items() if value is None)
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3), **values}
        if self._nonfinite:
            record["nonfinite"] = dict(self._nonfinite)
        _write(self._metrics, [record])

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Write one line for each rollout."""
        if self._samples:
            _write(self._samples, [to_json(asdict(record)) for record in records])

    def close(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._samples):
            if file:
                file.close()


def finite(value: float) -> float | None:
    """A plain number (of numpy and torch too), or None for NaN and infinity."""
    number = float(value)
    return number if math.isfinite(number) else None


def to_json(value: Any) -> Any:
    """The same with None for every NaN and infinity, and strings for what JSON does not know."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _open(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+")
    # A killed process may have left half a line: what follows must not be glued to it.
    if file.tell() > 0:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def _write(file: IO[bytes], records: Sequence[Mapping[str, Any]]) -> None:
    # Lone surrogates (half an emoji from a tokenizer) survive as escapes: ensure_ascii stays on.
    file.write(b"".join(json.dumps(record, allow_nan=False).encode() + b"\n" for record in records))
    file.flush()
