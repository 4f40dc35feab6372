"""A timeline for Perfetto: events of the Chrome trace format, one per line, in a JSON array that is never
closed.

Perfetto accepts such an unfinished array, so the file can be opened while it grows. Of plain JSON lines it
would read only one.
"""

import json
import threading
import zlib
from pathlib import Path
from typing import IO, Any

OPENING = b"[\n"
END = b",\n"
MAX_BYTES = 32 << 20  # size of one file, enough for about 900 steps of 32 groups; there are at most two files


class TraceWriter:
    """Slices on tracks of processes. Any thread may write."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Append to the file `path`. A full file is renamed to `<stem>.1.json`, replacing the one before."""
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._named: set[tuple[str, str]] = set()
        self._lanes: dict[str, list[float]] = {}
        self._file = self._open()

    def slice(
        self, process: str, track: str, name: str, start_at: float, end_at: float, **details: Any
    ) -> None:
        """Add an event from `start_at` to `end_at`, in Unix seconds. Overlapping events of a track must
        nest."""
        with self._lock:
            self._name(process, track)
            event = {
                "ph": "X",
                "name": name,
                "ts": round(start_at * 1e6),
                "dur": round(end_at * 1e6) - round(start_at * 1e6),
            }
            self._write(event | _where(process, track) | {"args": details})

    def lane(self, process: str, start_at: float, end_at: float) -> str:
        """Reserve a track of `process` from `start_at` to `end_at`, for events that do not nest, and return
        its name."""
        with self._lock:
            ends = self._lanes.setdefault(process, [])
            free = next((index for index, end in enumerate(ends) if end <= start_at), len(ends))
            ends[free : free + 1] = [end_at]
            return f"groups {free + 1:03}"

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _name(self, process: str, track: str) -> None:
        if (process, track) not in self._named:
            self._named.add((process, track))
            for kind, name in (("process_name", process), ("thread_name", track)):
                self._write({"ph": "M", "name": kind} | _where(process, track) | {"args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event, separators=(",", ":")).encode() + END)
        self._file.flush()
        if self._file.tell() > self._max_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(f"{self._path.stem}.1{self._path.suffix}"))
            self._named.clear()
            self._file = self._open()

    def _open(self) -> IO[bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("ab+")
        file.seek(0)
        whole = file.read().rfind(END) + len(END)  # a killed process may have left half a line
        if whole < len(OPENING + END):
            file.truncate(0)
            file.write(OPENING)
        else:
            file.truncate(whole)
        return file


def _where(process: str, track: str) -> dict[str, int]:
    """Ids of a process and a track, the same in every process and after every restart."""
    return {"pid": zlib.crc32(process.encode()) >> 1, "tid": zlib.crc32(f"{process} {track}".encode()) >> 1}
