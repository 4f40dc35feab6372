"""All descendants of a supervisor, including those that leave their session and clear their environment.

The kernel gives an orphan to the nearest ancestor that asked for orphans (a "subreaper"); no process can
refuse. So every descendant stays one while the supervisor lives, and the supervisor ends all before it exits.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator

import psutil

from asyncrl.hosting.processes import adopt_orphans

log = logging.getLogger(__name__)

LOOK_S = 10.0
# A parent that wants its child's exit status asks for it sooner.
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
        """Reap adopted processes that have ended, to free their process ids. Call this continually."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        ended = {process.pid for process in self._me.children() if _has_ended(process)}
        self._ended_s = {pid: self._ended_s.get(pid, now_s) for pid in ended}
        for pid, since_s in self._ended_s.items():
            if now_s - since_s > UNCLAIMED_S:
                _reap(pid)

    def end(self) -> None:
        """Kill all descendants that are left."""
        until_s = time.monotonic() + END_S
        logged: set[int] = set()
        while (left := self._members()) and time.monotonic() < until_s:
            alive = {process.pid for process in left if not _has_ended(process)}
            if new := sorted(alive - logged):
                log.warning("processes %s had left those that started them, and are killed", new)
                logged |= alive
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                _reap(process.pid)
            time.sleep(0.02)

    def _members(self) -> list[psutil.Process]:
        descendants = self._me.children(recursive=True)
        return [process for process in descendants if process.pid not in self._strangers]


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _reap(pid: int) -> None:
    # Not our child until its own parent has ended.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


@contextlib.contextmanager
def family() -> Iterator[Family]:
    """Adopt orphans inside the `with` block, which must contain all other ends of processes; then end all."""
    members = Family()
    adopt_orphans(True)
    try:
        yield members
    finally:
        members.end()
        adopt_orphans(False)
