"""The data of a run's server on disk: progress of loading, and data that cannot be loaded.

No run depends on these files: the learner's ledger decides what the store holds. Data that cannot be loaded
is moved aside and the server starts empty; if even that fails, the data is not the cause and is put back.
"""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from asyncrl.errors import StoreError

log = logging.getLogger(__name__)

DATA, ASIDE = "appendonlydir", "damaged-"
# The newest damaged data are kept for inspection.
KEPT = 2
# Longest wait for a server that does not answer at all.
SILENT_S = 30.0
# Longest wait for a server that is loading and reads nothing.
STUCK_S = 300.0
LOG_EVERY_S = 10.0
# SIGKILL and SIGTERM come from a user, or from the kernel for lack of memory.
ENDED_BY_OTHERS = (-9, -15)
# Errors in a server's log that have another cause than the data.
NOT_THE_DATA = (
    "No space left",
    "Disk quota exceeded",
    "Read-only file system",
    "Permission denied",
    "Operation not permitted",
    "Address already in use",
    "Cannot assign requested address",
    "Too many open files",
    "Cannot allocate memory",
    "Out Of Memory",
    "Out of memory",
)


class Loading:
    """The progress of a server that is loading its data."""

    def __init__(self) -> None:
        self._bytes: int | None = None
        self._moved_at_s = time.monotonic()
        self._logged_at_s = time.monotonic()

    def heard(self, persistence: Mapping[str, Any]) -> None:
        """Update the progress from the server's INFO."""
        now_s, loaded = time.monotonic(), int(persistence.get("loading_loaded_bytes", 0))
        if loaded != self._bytes:
            self._bytes, self._moved_at_s = loaded, now_s
        if now_s - self._logged_at_s >= LOG_EVERY_S:
            self._logged_at_s = now_s
            gib = int(persistence.get("loading_total_bytes", 0)) / 2**30
            percent = persistence.get("loading_loaded_perc", "?")
            left_s = persistence.get("loading_eta_seconds", "?")
            log.info("the store loads its log of %.1f GiB: %s %%, about %s s left", gib, percent, left_s)

    def is_stuck(self) -> bool:
        """Whether the server has made no progress for too long."""
        return time.monotonic() - self._moved_at_s > (SILENT_S if self._bytes is None else STUCK_S)

    def __str__(self) -> str:
        if self._bytes is None:
            return f"has been silent for {SILENT_S:.0f} s"
        return f"has not loaded a byte in {STUCK_S:.0f} s"


class StoreData:
    """The data of one server, which can be moved aside."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # The path of the data during an attempt to start without it.
        self._aside: Path | None = None
        # The number of times that this process has given up data.
        self.damaged = 0

    def may_be_why(self, status: int, said: str) -> bool:
        """Whether the data can be why a server ended with `status`, given the end of its log."""
        return (
            self._aside is None
            and os.path.lexists(self._directory / DATA)
            and status not in ENDED_BY_OTHERS
            and not any(reason in said for reason in NOT_THE_DATA)
        )

    def set_aside(self, said: str) -> None:
        """Move the data aside for an attempt to start without it. Raises StoreError."""
        numbers = sorted(self._numbers())
        self._aside = self._directory / f"{ASIDE}{(numbers or [0])[-1] + 1}"
        try:
            (self._directory / DATA).rename(self._aside)
        except OSError as error:
            self._aside = None
            raise StoreError(
                f"{self._directory / DATA} cannot be loaded or moved aside: {error}; its log ends:\n{said}"
            ) from error

    def put_back(self) -> None:
        """Move the data back, because the server did not start without it either."""
        if self._aside is not None:
            shutil.rmtree(self._directory / DATA, ignore_errors=True)  # made by the attempt without the data
            try:
                self._aside.rename(self._directory / DATA)
            except OSError as error:
                renamed = "%s cannot be renamed to %s (%s); the store will start empty"
                log.warning(renamed, self._aside, DATA, error)
            self._aside = None

    def loaded(self) -> None:
        """Report data that is aside as damaged, because the server has started without it."""
        if self._aside is None:
            return
        self.damaged += 1
        log.error(
            "the store could not load its data and starts empty; the learner's ledger decides what is "
            "sampled again. The data is kept as %s, with the newest %d; this is number %d since the start",
            *(self._aside, KEPT, self.damaged),
        )
        self._aside = None
        for number in sorted(self._numbers())[:-KEPT]:
            path = self._directory / f"{ASIDE}{number}"
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    def _numbers(self) -> list[int]:
        names = [name.removeprefix(ASIDE) for name in os.listdir(self._directory) if name.startswith(ASIDE)]
        return [int(name) for name in names if name.isdecimal()]


def open_log(path: Path) -> IO[bytes]:
    """Open the log of a server, or an unnamed temporary file if that fails."""
    try:
        return path.open("ab+", buffering=0)
    except OSError as error:
        log.warning("%s cannot be written (%s); the store's log is lost when it ends", path, error)
        return tempfile.TemporaryFile(buffering=0)
