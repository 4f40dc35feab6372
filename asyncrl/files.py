"""Writes small files atomically, because other processes read them. For checkpoints see `run.checkpoint`."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MOST_SOCKET_BYTES = 107  # of a socket's path in Linux
_RUN = "(for a run: run.root=DIRECTORY)"
_ANOTHER_PLACE = f"give another place {_RUN}"
# Advice for errors of the operating system, by their number.
CURES: Mapping[int, str] = {
    errno.ENOSPC: f"free some space there, or give a place on another disk {_RUN}",
    errno.EDQUOT: f"your quota is used up: free space, or use another disk {_RUN}",
    errno.EROFS: f"give a place that can be written {_RUN}",
    errno.EACCES: f"ask for the right to use it, or {_ANOTHER_PLACE}",
    errno.EPERM: f"ask for the right to use it, or {_ANOTHER_PLACE}",
    errno.ENOTDIR: f"a file stands where a directory is needed: move it, or {_ANOTHER_PLACE}",
    errno.EEXIST: f"that name is taken: move it, or {_ANOTHER_PLACE}",
    errno.EISDIR: "a directory stands where a file is needed: move it, or give a file",
    errno.ENOENT: f"give a path that exists or can be made {_RUN}",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "allow more open files: ulimit -n 65536",
    errno.EIO: "look at the disk: dmesg says more",
}
_reported: set[tuple[str, str]] = set()  # paths and reasons that were logged


def with_cure(error: OSError, place: object) -> str:
    """Return a message: where, what was found, what to do. `place` is used if the error names no file."""
    cure = CURES.get(error.errno or 0, _ANOTHER_PLACE)
    return f"{error.filename or place}: {error.strerror or error}; {cure}"


def replace_text(path: Path, text: str, *, durable: bool = False, private: bool = False) -> None:
    """Write a file atomically: readers see either the old content or the new.

    A loss of power may empty the file unless `durable`. With `private` only the owner can ever read it.
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


def make_private(path: Path) -> None:
    """Make a directory and its parents durably: otherwise a loss of power could remove synced files in it."""
    made = [directory for directory in (path, *path.parents) if not directory.exists()] or [path]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def socket_path(wanted: Path) -> Path:
    """Return a path for a unix socket: `wanted`, or one through a link if that is too long."""
    path = wanted.resolve()
    return path if len(os.fsencode(path)) <= MOST_SOCKET_BYTES else _link_to(path.parent) / path.name


def plain_path(path: str) -> str:
    """Return a path for a library that would take `[` in it for a pattern: a link, if there is any."""
    return path if escape(path) == path else str(_link_to(Path(path).resolve()))


def _link_to(path: Path) -> Path:
    """Return a link in a private directory. Raises PermissionError if another user has made that."""
    private = Path(tempfile.gettempdir()) / f"asyncrl-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    if private.lstat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "belongs to another user", str(private))
    link = private / hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    with contextlib.suppress(FileExistsError):
        link.symlink_to(path)
    return link


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it is missing, or cannot be read, which is logged once."""
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
    """Log that a file is ignored, once for each reason."""
    if (found := (str(path), str(reason))) not in _reported:
        _reported.add(found)
        log.warning("%s cannot be read and counts as missing: %s", path, reason)
