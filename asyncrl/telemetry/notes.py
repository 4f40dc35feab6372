"""Reads from the logs of all processes what a person should see: warnings, errors, and what each process is
doing."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncrl.telemetry.history import Tail

LAST_BYTES = 1 << 16  # read at most this much of a log that exists already
LOUD = ("warning", "error", "critical")
# Loggers of our modules and of modules that are started with -m. Libraries warn about much that is harmless
# here.
OWN = ("asyncrl", "__main__")
BEGINS = re.compile(r"log of process \d+ begins")
LONGEST = 600


@dataclass(frozen=True, slots=True)
class Note:
    """One line of a log."""

    at: float  # Unix seconds
    process: str
    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.process}: {self.text}"


class NoteReader:
    """Reads the logs of a run directory again and again, each time only what is new."""

    def __init__(self, directory: Path, *, since: float, without: str = "") -> None:
        """Read the logs in `directory`, except lines from before `since` (Unix seconds) and the log of
        `without`."""
        self._directory = directory
        self._without = without
        self._since = since
        self._tails: dict[str, Tail] = {}
        self.doing: dict[str, str] = {}  # newest info line of each process

    def read(self) -> list[Note]:
        """New warnings and errors, in order of time."""
        for path in (path for path in sorted(self._directory.glob("*.jsonl")) if path.stem != self._without):
            self._tails.setdefault(path.stem, Tail(path, last_bytes=LAST_BYTES))
        found = [
            note
            for tail in self._tails.values()
            for record in tail.read()
            if (note := _note(record)) is not None
        ]
        found = sorted((note for note in found if note.at >= self._since), key=lambda note: note.at)
        self.doing.update(
            {note.process: BEGINS.sub("starting", note.text) for note in found if note.level == "info"}
        )
        return [note for note in found if note.level in LOUD]


def _note(record: Mapping[str, Any]) -> Note | None:
    """The line as a note; None for lines of libraries."""
    try:
        at = datetime.fromisoformat(str(record["time"])).timestamp()
        logger, process, level, text = (str(record[name]) for name in ("logger", "process", "level", "event"))
    except (KeyError, ValueError):
        return None
    if logger.partition(".")[0] not in OWN or record.get("rank"):  # all ranks log alike: rank 0 is enough
        return None
    cause = str(record.get("exception") or "").strip().rpartition("\n")[2]
    return Note(at, process, level, f"{text}: {cause}"[:LONGEST] if cause else text[:LONGEST])
