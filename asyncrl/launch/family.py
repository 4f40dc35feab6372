"""Everybody whom a supervisor's processes bring forth, also who leaves his session and sheds his environment.

The kernel gives an orphan to the nearest ancestor that asked for orphans (a "subreaper"), which no process can refuse. So whoever
descends from a supervisor stays its descendant as long as it lives, and it ends them all before it goes.
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
UNCLAIMED_S = 120.0
"""Whoever started a process asks for its status sooner."""
END_S = 10.0


class Family:
    """The descendants of this process that it did not have before."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._strangers = {process.pid for process in self._me.children(recursive=True)}
        self._ended_s: dict[int, float] = {}
        self._look_at_s = 0.0

    def tend(self) -> None:
        """To be called all the time: takes leave of adopted ones that have ended, whose numbers nobody could use otherwise."""
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
        """End whoever is left."""
        until_s = time.monotonic() + END_S
        told: set[int] = set()
        while (left := self._members()) and time.monotonic() < until_s:
            if new := [process.pid for process in left if process.pid not in told and not _has_ended(process)]:
                log.warning("processes %s had left those that started them, and are killed", new)
                told.update(new)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                _take_leave(process.pid)
            time.sleep(0.02)

    def _members(self) -> list[psutil.Process]:
        return [process for process in self._me.children(recursive=True) if process.pid not in self._strangers]


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
    """Adopts orphans until it is left, and ends all descendants then. The outermost of what ends processes."""
    members = Family()
    adopt_orphans(True)
    try:
        yield members
    finally:
        members.end()
        adopt_orphans(False)
