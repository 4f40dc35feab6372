"""Writing that may fail: the few operations that durability rests on, in one object, so that a test can fail each of them."""

import fcntl
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError

from asyncrl.errors import RunError


class FileOps:
    """Operations that change or order what is on disk."""

    def write(self, path: Path, data: bytes) -> None:
        """Create or overwrite a file; durable only after `fsync`."""
        path.write_bytes(data)

    def fsync(self, path: Path) -> None:
        """Make a file's content, or a directory's entries, durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; durable only after `fsync` of the directory."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """A whole directory."""
        shutil.rmtree(path)

    def free_bytes(self, directory: Path) -> int:
        """What the disk under `directory` still takes."""
        return shutil.disk_usage(directory).free


@dataclass(slots=True)
class Writes:
    """The writes of one rank in one save: after one that failed the others are left out.

    A rank that gave up at once would leave the others waiting in the next collective.
    """

    failure: str = ""
    """Of the first that failed."""

    def attempt(self, write: Callable[[], object]) -> None:
        """Run `write`, unless one has failed already."""
        if self.failure:
            return
        try:
            write()
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own words for a full disk
            self.failure = f"{type(error).__name__}: {error}"


class RunLock:
    """Exclusive leave to write a run's checkpoints, held by one process on one host; freed by the kernel when it dies."""

    def __init__(self, path: Path) -> None:
        """Take the lock in file `path`. Raises RunError naming the holder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise RunError(
                f"{path}: this run is held by {holder}; stop that learner first, or start a run with another run.name"
            ) from None
        self._file.truncate(0)
        self._file.write(f"pid {os.getpid()} on host {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Free the lock; the file stays, so that nobody locks a file that another is about to delete."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.release()
