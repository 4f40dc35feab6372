"""All descendants of a supervisor, also those that leave their session and clear their environment.

The kernel gives an orphan to the nearest ancestor that asked for orphans (a "subreaper"); no process can
refuse this. So every descendant of a supervisor stays its descendant as long as the supervisor lives, and the
supervisor ends them all before it exits.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator

import psutil

from asyncrl.processes import adopt_orphans

log = logging.getLogger(__name__)

LOOK_S = 10.0
# The process that started another one asks for its status sooner.
UNCLAIMED_S = 120.0
END_S = 10.0


class Family:
    """The descendants of this process that it did not have before."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._strangers = {process.pid for process in self._me.children(recursive=True)}
        self._ended_s: dict[int, float] = {}
        self._look_at_s = 0.0

    def tend(self) -> None:
        """Reap adopted processes that have ended, so that their numbers become free. Call this all the
        time."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        ended = {process.pid for process in self._me.children() if _has_ended(process)}
        self._ended_s = {pid: self._ended_s.get(pid, now_s) for pid in ended}
        for pid, since_s in self._ended_s.items():
            if now_s - since_s > UNCLAIMED_S:
                _take_leave(pid)

    def end(self) -> None:
        """End all that are left."""
        until_s = time.monotonic() + END_S
        told: set[int] = set()
        while (left := self._members()) and time.monotonic() < until_s:
            if new := [
                process.pid for process in left if process.pid not in told and not _has_ended(process)
            ]:
                log.warning("processes %s had left those that started them, and are killed", new)
                told.update(new)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                _take_leave(process.pid)
            time.sleep(0.02)

    def _members(self) -> list[psutil.Process]:
        return [
            process for process in self._me.children(recursive=True) if process.pid not in self._strangers
        ]


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _take_leave(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # not a child yet: its parent goes first
        os.waitpid(pid, os.WNOHANG)


@contextlib.contextmanager
def family() -> Iterator[Family]:
    """Adopt orphans inside the `with` block, and end all descendants at its end. Every other end of processes
    lies within it."""
    members = Family()
    adopt_orphans(True)
    try:
        yield members
    finally:
        members.end()
        adopt_orphans(False)
