"""What a supervisor needs of a host: a clock, and processes that it starts and ends with their children.

Children may leave their session and clear their environment. But the kernel gives an orphan to the nearest
ancestor that asked for orphans (a "subreaper"), and no process can refuse. So every descendant stays one
while the supervisor lives, and the supervisor ends all before it exits: see `family`.
"""

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import psutil

from asyncrl.best_effort import BestEffort
from asyncrl.hosting.processes import adopt_orphans, kill_group
from asyncrl.hosting.progress import Board, Sign, variable

log = logging.getLogger(__name__)

LOOK_S = 10.0
# A parent that wants its child's exit status asks for it sooner.
UNCLAIMED_S = 120.0
END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to keep alive."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    ends_run: bool = False  # true for the learner: its exit with status 0 ends the run
    is_extra: bool = False  # added while the run went on: if it fails too often, the run goes on without it
    kind: str = ""  # so it does while another one of this kind runs
    serves: bool = False  # the others: they finish, and it does not
    standby_argv: Sequence[str] | None = None  # starts a standby, which takes over after a line on its stdin
    grace_s: float = 15.0  # seconds between SIGTERM and SIGKILL
    workers: Sequence[str] = ()  # names of its processes that report progress; default: only itself


class Process(Protocol):
    """A process that was started, with all processes of its session and their signs of progress."""

    @property
    def pid(self) -> int:
        """Its id on its host."""

    def signs(self) -> Mapping[str, Sign]:
        """Return the last sign of each worker, by name."""

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""

    def terminate(self) -> None:
        """Ask the process to leave."""

    def kill(self) -> None:
        """Kill the whole session, also children of a dead process: engine cores, reward workers, senders."""

    def take_over(self) -> None:
        """Call a standby. Raises BrokenPipeError if it has ended."""

    def close(self) -> None:
        """Release what the host holds for the process."""


class _Child(subprocess.Popen[bytes]):
    """A child process with a session of its own."""

    board: Board

    def signs(self) -> Mapping[str, Sign]:
        return self.board.signs()

    def kill(self) -> None:
        kill_group(self.pid)

    def take_over(self) -> None:
        assert self.stdin is not None, "only a standby has a pipe"
        with self.stdin as pipe:
            pipe.write(b"\n")

    def close(self) -> None:
        if self.stdin is not None:
            self.stdin.close()
        self.board.close()


class ThisHost:
    """The host of this process. Others override its clock, and how processes start."""

    def now_s(self) -> float:
        """Return the time in seconds, which never goes back."""
        return time.monotonic()

    def sleep(self, wait_s: float) -> None:
        time.sleep(wait_s)

    def start(self, spec: ProcessSpec, *, stands_by: bool = False) -> Process:
        """Start the process, or a standby of it, with a session of its own. Raises OSError."""
        argv = spec.standby_argv if stands_by else spec.argv
        assert argv is not None
        board = Board(spec.workers or (spec.name,))
        with _output(spec.log_path) as output, contextlib.ExitStack() as undo:
            undo.callback(board.close)
            child = _Child(
                list(argv),
                env=dict(spec.env) | variable(board.descriptor, 0),
                stdin=subprocess.PIPE if stands_by else subprocess.DEVNULL,
                bufsize=0,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A terminal's Ctrl-C does not reach another session, and all processes in it can be killed.
                start_new_session=True,
                pass_fds=[board.descriptor],
            )
            undo.pop_all()
        child.board = board
        return child


def _output(path: Path) -> IO[bytes]:
    """The file for a process's output: its log, or our standard error if the log cannot be opened."""
    try:
        return path.open("ab")
    except OSError as error:
        log.warning("%s cannot be written (%s); the output goes to standard error", path, error)
        return os.fdopen(os.dup(2), "wb")


class Family:
    """The descendants of this process that it did not have before."""

    def __init__(self) -> None:
        self._me, self._may_fail = psutil.Process(), BestEffort()
        self._strangers = {process.pid for process in self._me.children(recursive=True)}
        self._ended_s: dict[int, float] = {}
        self._look_at_s = 0.0

    def tend(self) -> None:
        """Reap adopted processes that have ended, to free their ids. What fails is logged and tried again."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        with self._may_fail("the reaper"):
            ended = {process.pid for process in self._me.children() if has_ended(process)}
            self._ended_s = {pid: self._ended_s.get(pid, now_s) for pid in ended}
            for pid, since_s in self._ended_s.items():
                if now_s - since_s > UNCLAIMED_S:
                    _reap(pid)

    def end(self) -> None:
        """Kill all descendants that are left."""
        until_s = time.monotonic() + END_S
        logged: set[int] = set()
        while time.monotonic() < until_s:
            descendants = self._me.children(recursive=True)
            left = [process for process in descendants if process.pid not in self._strangers]
            if not left:
                break
            alive = {process.pid for process in left if not has_ended(process)}
            if new := sorted(alive - logged):
                log.warning("processes %s had left those that started them, and are killed", new)
                logged |= alive
            for process in left:
                with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
                    process.kill()
                _reap(process.pid)
            time.sleep(0.02)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended. A zombie has, though `psutil.wait_procs` would wait for its parent."""
    try:
        return bool(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
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
