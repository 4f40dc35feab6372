"""The locks of a run: only one process may supervise it, and only one may write its checkpoints."""

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Self

from asyncrl.errors import RunError

LOCK_ATTEMPTS, LOCK_PAUSE_S = 10, 0.05


class RunLock:
    """An exclusive lock, which the kernel frees when its process dies."""

    def __init__(self, path: Path) -> None:
        """Take the lock in file `path`. Raises RunError naming the holder."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            try:
                self._take(path)
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            cure = "it must be a file that you may write, on a file system with locks"
            raise RunError(f"{path} cannot be locked: {error}; {cure}") from error

    def _take(self, path: Path) -> None:
        # `is_locked` in another process holds the lock for a moment.
        for attempt in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == LOCK_ATTEMPTS - 1:
                    found = f"{path}: this run is held by {holder_of(path)}"
                    raise RunError(f"{found}; stop that process first, or choose another run.name") from None
                time.sleep(LOCK_PAUSE_S)
        with contextlib.suppress(OSError):  # on a full disk the holder stays unnamed
            self._file.truncate(0)
            self._file.write(f"pid {os.getpid()} on host {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Free the lock. The file stays, because another process may just have locked it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(path: Path) -> bool:
    """Return whether a process, here or on another host, holds the lock in file `path`. Raises RunError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return False
    except OSError as error:
        cure = "it says whether the run is up, and must be a file that you may read"
        raise RunError(f"{path} cannot be read: {error}; {cure}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            raise RunError(f"{path} cannot be locked: {error}; ask on the host of the run") from error
    return False


def holder_of(path: Path) -> str:
    """Return the process id and host that the holder of a lock wrote into it."""
    try:
        return path.read_text(errors="replace").strip() or "a process that left no name"
    except OSError:
        return "a process that cannot be named"
