"""A generator's part of an order while requests run: refuse paths, fetch from the network, verify.

    slot in host memory or a file    verified
    tcp, nccl                        fetched and verified once for this host; the order then names that slot
    slot on a GPU                    left to the engine, which verifies before it loads

So requests wait only for the loading, not for the network, and a failed transfer leaves the weights in use
unchanged. The generators of a host share the slot that one of them has fetched, for all its workers:

    the first one   takes the run's lock on this host, fetches into a slot of its own, writes into the lock's
                    file where that is
    the others      wait for the lock, open that slot, and keep a shared lock on it until their next order

All locks are the kernel's, so they end with their process. The first one touches the file whenever a piece
arrives; if its time stands still, because the process is stopped, the others fetch for themselves.
A slot with a shared lock is not written, so an owner has as many slots as slow readers need, usually two.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.errors import TransferError
from asyncrl.weights.base import UpdateOrder
from asyncrl.weights.layout import Layout, verify
from asyncrl.weights.nccl import NcclFetcher
from asyncrl.weights.slots import STAMP, Slot, open_slot
from asyncrl.weights.stream import fetch

log = logging.getLogger(__name__)

_OPEN_FILE = re.compile(r"/proc/\d+/fd/\d+")
_MEMORY = Path("/dev/shm")
# Without progress of the process that fetches; at most a quarter of the time that is left.
SILENT_S = 5.0
_POLL_S = 0.01
# Head start of the process that has memory from the version before.
_GRACE_S = 0.05
_DAY_S = 86400.0
# Of a description: within one page, so that it is written as a whole.
_MOST_BYTES = 256


class HostStaging:
    """Implements `weights.base.Staging`."""

    def __init__(self, files: Path) -> None:
        """Orders may come from another host, so the paths in them must be below the directory `files`."""
        self._files, self._relay = files.resolve(), Relay()

    def stage(self, order: UpdateOrder) -> UpdateOrder:
        until_s = time.monotonic() + order.deadline_s
        slot = order.details.get("slot", {})
        path = str(slot.get("path"))
        if order.transport == "slot" and not _OPEN_FILE.fullmatch(path):
            raise TransferError(
                f"weights: an order names {path}; a slot is an open file of a process, /proc/PID/fd/N"
            )
        if order.transport == "disk" and not Path(path).resolve().is_relative_to(self._files):
            raise TransferError(
                f"weights: an order names {path}, but a generator uses nothing outside {self._files}; start "
                "`asyncrl generator` in the learner's working directory, or set an absolute run.root or a "
                "control.bind, with which weights need no common files"
            )
        if slot.get("exported") is not None:
            return order
        layout = Layout.from_plain(order.details["layout"])
        sums = order.details["checksums"]
        if order.transport in ("tcp", "nccl"):
            slot = self._relay.bring(order.transport, order.details["source"], layout, sums, until_s=until_s)
            return replace(order, transport="slot", details={**order.details, "slot": slot})
        verify(open_slot(slot, layout.total_bytes, keep=True).buffer, layout, sums)
        return order

    def close(self) -> None:
        self._relay.close()


class Relay:
    """One generator's part of the sharing."""

    def __init__(self, directory: Path | None = None) -> None:
        """`directory` is for the files of the locks: memory of this host by default, private to the user."""
        self._directory = directory or _MEMORY / f"asyncrl-{os.getuid()}"
        self._path: Path | None = None
        self._own: list[Slot] = []
        self._held: int | None = None  # the file of another process's slot, with a shared lock
        self._nccl = NcclFetcher()
        self._silent_ns = 0  # the file's time when we did not wait for its holder

    def bring(
        self,
        transport: str,
        source: Mapping[str, Any],
        layout: Layout,
        checksums: Sequence[int],
        *,
        until_s: float,
    ) -> dict[str, Any]:
        """Return the description of a slot with the publication of `source`, verified by one process here.

        The slot stays as it is until the next call. Raises TransferError, at the latest at `until_s`.
        """
        self._release()
        # No other publication of any run has this stamp, and the name does not give the key away.
        digest = hashlib.sha256(repr((source.get("key"), source.get("stamp"))).encode()).digest()
        stamp, name = STAMP.unpack(digest[: STAMP.size])[0], hashlib.sha256(repr(source.get("key")).encode())
        file: int | None = None
        try:
            file = self._turn(name.hexdigest(), until_s)
            if shared := self._open_shared(file, stamp, layout.total_bytes):
                self._drop_idle()
                self._nccl.close()
                return shared
            if time.monotonic() >= until_s:  # a copy would take memory for nothing
                raise TransferError(
                    "weights: the deadline has passed while another generator of this host fetched them; the "
                    "next order brings them again. If it repeats, raise weights.deadline_s"
                )
            slot = self._writable(layout.total_bytes)
            if transport == "nccl":
                self._nccl.fetch(source, slot, layout, checksums, until_s=until_s, touched=file)
            else:
                touch = partial(os.utime, file)
                fetch(source, slot.buffer, layout, checksums, until_s=until_s, on_progress=touch)
            slot.complete(stamp)
            fcntl.flock(slot.file, fcntl.LOCK_UN)
            os.pwrite(file, json.dumps(slot.describe()).encode().ljust(_MOST_BYTES), 0)
            return slot.describe()
        except OSError as error:
            raise TransferError(f"weights: this host has no place for a version: {error}") from error
        finally:
            if file is not None:
                os.close(file)  # and so unlocks it

    def close(self) -> None:
        """Release all slots; other processes keep what they have open."""
        self._release()
        self._nccl.close()
        for slot in self._own:
            slot.close()
        self._own.clear()
        if self._path:
            self._path.unlink(missing_ok=True)

    def _turn(self, name: str, until_s: float) -> int:
        """The locked file of this run, to be closed.

        It is an empty file of our own if this host has no place for one, or if the holder does nothing.
        """
        file: int | None = None
        try:
            file = self._open(name)
            if self._lock(file, until_s):
                return file
        except OSError as error:
            log.warning("weights are not shared with other generators of this host: %s", error)
        if file is not None:
            os.close(file)
        return os.memfd_create("asyncrl-alone", os.MFD_CLOEXEC)

    def _open(self, name: str) -> int:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        found = self._directory.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{self._directory} is open to others; remove it")
        path = self._directory / name
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size < _MOST_BYTES:  # a full disk would not take the description later
                os.posix_fallocate(file, 0, _MOST_BYTES)
        except OSError:
            os.close(file)
            raise
        if self._path != path:
            self._path = path
            os.utime(file)
            oldest_s = os.fstat(file).st_mtime - _DAY_S
            for other in self._directory.iterdir():  # of runs that were killed
                with contextlib.suppress(FileNotFoundError):
                    if other.stat().st_mtime < oldest_s:
                        other.unlink()
        return file

    def _lock(self, file: int, until_s: float) -> bool:
        """Whether the lock was to be had, before `until_s`, while its holder still made progress."""
        said = _read(file)
        if said and not str(said.get("path")).startswith(f"/proc/{os.getpid()}/"):
            time.sleep(_GRACE_S)
        seen_ns, since_s = 0, time.monotonic()
        silent_s = min(SILENT_S, (until_s - since_s) / 4)
        while not _locked(file, fcntl.LOCK_EX):
            touched_ns, now_s = os.fstat(file).st_mtime_ns, time.monotonic()
            if touched_ns != seen_ns:
                seen_ns, since_s = touched_ns, now_s
            if now_s - since_s > silent_s or touched_ns == self._silent_ns or now_s > until_s:
                self._silent_ns = touched_ns
                return False
            time.sleep(_POLL_S)
        return True

    def _open_shared(self, file: int, stamp: int, size_bytes: int) -> dict[str, Any] | None:
        """The slot of another process, if it holds this publication; it will not be written meanwhile."""
        said = _read(file)
        if said is None or said.get("stamp") != stamp or not _OPEN_FILE.fullmatch(str(said.get("path"))):
            return None
        with contextlib.suppress(OSError):  # that process has ended, and its number may be used again
            held = self._held = os.open(said["path"], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            if _locked(held, fcntl.LOCK_SH) and os.pread(held, STAMP.size, size_bytes) == STAMP.pack(stamp):
                return {"path": f"/proc/{os.getpid()}/fd/{held}", "stamp": stamp, "exported": None}
        self._release()
        return None

    def _writable(self, size_bytes: int) -> Slot:
        """A slot of ours without readers, with a lock that keeps them out."""
        free = [slot for slot in self._idle() if len(slot.buffer) == size_bytes]
        if not free:
            self._drop_idle()
            free = [Slot.create(size_bytes)]
            self._own += free
            _locked(free[0].file, fcntl.LOCK_EX)
        free[0].prepare()
        free[0].begin()
        return free[0]

    def _idle(self) -> list[Slot]:
        """Our slots without readers; they cannot get any before they are unlocked."""
        return [slot for slot in self._own if _locked(slot.file, fcntl.LOCK_EX)]

    def _drop_idle(self) -> None:
        for slot in self._idle():
            self._own.remove(slot)
            slot.close()

    def _release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _locked(file: int, kind: int) -> bool:
    """Whether the lock, which no other process may rule out, could be taken now."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: int) -> dict[str, Any] | None:
    """The description in the file of a run; None if there is none."""
    with contextlib.suppress(ValueError):
        said = json.loads(os.pread(file, _MOST_BYTES, 0))
        return said if isinstance(said, dict) else None
    return None
