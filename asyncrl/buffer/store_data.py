"""What the server of a run keeps on disk: whether it loads, and what becomes of data that does not.

Nothing rests on these files: the learner's ledger decides what the store still knows. So data that cannot be loaded is
moved aside, and the server starts empty. Whether the data is to blame is found by trying: when the server does not start
without it either, the data is put back.
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
# Of what was moved aside: to look at, until the next two.
KEPT = 2
# For a server that lives and says nothing, not even that it loads.
SILENT_S = 30.0
# For one that says that it loads, and has not read a byte since.
STUCK_S = 300.0
TELL_S = 10.0
# SIGKILL and SIGTERM: somebody, or a kernel without memory.
ENDED_BY_OTHERS = (-9, -15)
# In the log of a server that ended: what a person mends, and what may pass.
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
    """How far a server has come that was just started."""

    def __init__(self) -> None:
        self._bytes: int | None = None
        self._moved_at_s = time.monotonic()
        self._told_at_s = time.monotonic()

    def heard(self, persistence: Mapping[str, Any]) -> None:
        """What INFO says of it."""
        now_s, loaded = time.monotonic(), int(persistence.get("loading_loaded_bytes", 0))
        if loaded != self._bytes:
            self._bytes, self._moved_at_s = loaded, now_s
        if now_s - self._told_at_s >= TELL_S:
            self._told_at_s = now_s
            total, percent = int(persistence.get("loading_total_bytes", 0)), persistence.get("loading_loaded_perc", "?")
            log.info(
                "the store loads its log of %.1f GiB: %s %%, about %s s left",
                total / 2**30,
                percent,
                persistence.get("loading_eta_seconds", "?"),
            )

    def is_stuck(self) -> bool:
        """Whether there is nothing to wait for."""
        return time.monotonic() - self._moved_at_s > (SILENT_S if self._bytes is None else STUCK_S)

    def __str__(self) -> str:
        return f"has been silent for {SILENT_S:.0f} s" if self._bytes is None else f"has not loaded a byte in {STUCK_S:.0f} s"


class StoreData:
    """The data of one server, as far as it may be done without."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._aside: Path | None = None
        """Where the data is while a start without it is tried."""
        self.damaged = 0
        """How often data was given up by this process."""

    def may_be_why(self, status: int, said: str) -> bool:
        """Whether a server that ended with `status` and these words could not load its data."""
        return (
            self._aside is None
            and os.path.lexists(self._directory / DATA)
            and status not in ENDED_BY_OTHERS
            and not any(reason in said for reason in NOT_THE_DATA)
        )

    def set_aside(self, said: str) -> None:
        """Try without the data. Raises StoreError."""
        numbers = sorted(self._numbers())
        self._aside = self._directory / f"{ASIDE}{(numbers or [0])[-1] + 1}"
        try:
            (self._directory / DATA).rename(self._aside)
        except OSError as error:
            self._aside = None
            raise StoreError(
                f"{self._directory / DATA} cannot be loaded, nor moved aside: {error}; its log ends:\n{said}"
            ) from error

    def put_back(self) -> None:
        """The data was not to blame."""
        if self._aside is not None:
            shutil.rmtree(self._directory / DATA, ignore_errors=True)  # of a server that never came up
            try:
                self._aside.rename(self._directory / DATA)
            except OSError as error:
                log.warning("%s cannot be named %s again (%s); the store will start empty", self._aside, DATA, error)
            self._aside = None

    def loaded(self) -> None:
        """The server answers: what is still aside was to blame."""
        if self._aside is None:
            return
        self.damaged += 1
        log.error(
            "the store could not load its data and starts empty: the learner's ledger decides what has to be sampled again. The "
            "data is kept as %s (the newest %d are; this is number %d since the start)",
            self._aside,
            KEPT,
            self.damaged,
        )
        self._aside = None
        for number in sorted(self._numbers())[:-KEPT]:
            path = self._directory / f"{ASIDE}{number}"
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    def _numbers(self) -> list[int]:
        names = [name.removeprefix(ASIDE) for name in os.listdir(self._directory) if name.startswith(ASIDE)]
        return [int(name) for name in names if name.isdecimal()]


def open_log(path: Path) -> IO[bytes]:
    """Where a server writes what it does; a file without a name when the log cannot be opened."""
    try:
        return path.open("ab+", buffering=0)
    except OSError as error:
        log.warning("%s cannot be written (%s); the store's log is lost when it ends", path, error)
        return tempfile.TemporaryFile(buffering=0)
