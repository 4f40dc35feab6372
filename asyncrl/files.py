"""Writes small files atomically, because other processes read them. For checkpoints see `run.checkpoint`."""

import contextlib
import errno
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# Advice for errors of the operating system, by their number.
CURES: Mapping[int, str] = {
    errno.ENOSPC: "free some space there, or give a place on another disk (for a run: run.root=DIRECTORY)",
    errno.EDQUOT: "your quota is used up: free space, or use another disk (for a run: run.root=DIRECTORY)",
    errno.EROFS: "give a place that can be written (for a run: run.root=DIRECTORY)",
    errno.EACCES: "ask for the right to use it, or give another place (for a run: run.root=DIRECTORY)",
    errno.EPERM: "ask for the right to use it, or give another place (for a run: run.root=DIRECTORY)",
    errno.ENOTDIR: "a file stands where a directory is needed: move it, or give another place (for a run: "
    "run.root=DIRECTORY)",
    errno.EEXIST: "that name is taken: move it, or give another place (for a run: run.root=DIRECTORY)",
    errno.EISDIR: "a directory stands where a file is needed: move it, or give a file",
    errno.ENOENT: "give a path that exists or can be made (for a run: run.root=DIRECTORY)",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "allow more open files: ulimit -n 65536",
    errno.EIO: "look at the disk: dmesg says more",
}

_reported: set[tuple[str, str]] = set()


def with_cure(error: OSError, place: object) -> str:
    """The error as a message: where, what was found, what to do. `place` is used if the error names no
    file."""
    cure = CURES.get(error.errno or 0, "give another place (for a run: run.root=DIRECTORY)")
    return f"{error.filename or place}: {error.strerror or error}; {cure}"


def replace_text(path: Path, text: str, *, durable: bool = False, private: bool = False) -> None:
    """Write a file atomically: readers see either the old content or the new.

    With `durable` this holds after a loss of power too; without, the file may then be empty. With `private`
    only the owner can ever read it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error  # with the name that users know
    if durable:
        sync(path.parent)


def make_directory(path: Path, *, private: bool = False) -> None:
    """Make a directory and its parents durably: without that, a loss of power could remove synced files in
    it."""
    made = [directory for directory in (path, *path.parents) if not directory.exists()] or [path]
    path.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    for directory in made:
        sync(directory.parent)


def sync(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_below(directory: Path) -> None:
    """Make everything in a directory durable. To keep its name too, sync its parent."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def read_record(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file that a run rewrites often; None if it is missing or cannot be read, which is
    logged once."""
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        tell_unreadable(path, error)
        return None
    if isinstance(record, dict):
        return record
    tell_unreadable(path, f"it holds {type(record).__name__}, not an object")
    return None


def tell_unreadable(path: Path, reason: object) -> None:
    """Log once for each reason that a file is ignored."""
    if (str(path), str(reason)) not in _reported:
        _reported.add((str(path), str(reason)))
        log.warning("%s cannot be read and counts as not there: %s", path, reason)
