"""Starts the processes of a run, restarts those that die or hang, and ends all of them with their children.

    starting -> running -> exited 0          its work is done
                   |  ^--- back-off --- died  restarted, at most `max_restarts` times in ten minutes
                   v                     ^--- silent for too long (see asyncrl/progress.py): killed
                given up                     the whole run stops with a message

A process that exits with `USER_ERROR` is not restarted, because it would find the same mistake again.
Processes may be added and drained while the run goes on.
"""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from asyncrl.backoff import Backoff
from asyncrl.errors import RunError
from asyncrl.processes import stop_processes
from asyncrl.progress import UNLIMITED, Attention, Board, Limits, Watch
from asyncrl.telemetry.deaths import Deaths, last_message

log = logging.getLogger(__name__)

USER_ERROR = 2  # exit status of a process that found a user's mistake: never restarted
FAULT_FOUND = (
    3  # exit status of a process that found a fault which may recur; given up after `SAME_FAULTS` in a row
)
SAME_FAULTS = 3
_RESTART_WINDOW_S = 600.0
_BACKOFF = Backoff(0.5, 15.0)
_LEFT_S = 10.0
_KILL_S = 60.0  # a killed process that exists after this long is held in the kernel, by a driver or a disk
_STANDBY_AFTER_S = 60.0  # pause before a standby starts: the start of a run is the machine's busiest time


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to keep alive."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    ends_run: bool = False  # true for the learner: its exit with status 0 ends the run
    is_extra: bool = (
        False  # added while the run went on: if it fails too often it is removed and the run goes on
    )
    standby_argv: Sequence[str] | None = None  # starts a standby, which takes over after a line on its stdin
    grace_s: float = 15.0  # seconds between SIGTERM and SIGKILL
    workers: Sequence[
        str
    ] = ()  # names of the places 0, 1, ... of its board, if several of its processes report progress


@dataclass(slots=True)
class _Family:
    """A process with all its children, and the board on which they report progress."""

    process: subprocess.Popen[bytes]
    watch: Watch

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill the whole session, also children of a dead process: engine cores, reward workers, senders."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def bury(self) -> None:
        """Clean up after the process has ended."""
        self.kill()
        self.watch.board.close()


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    family: _Family | None = None
    standby: _Family | None = None
    standby_at_s: float = 0.0
    hung: str | None = None  # why it was killed
    hung_at_s: float = 0.0
    deaths_s: deque[float] = field(default_factory=deque)
    start_at_s: float = 0.0
    finished: bool = False
    kill_at_s: float | None = None  # when to kill it, if it was asked to leave
    deaths: Deaths = field(init=False)

    def __post_init__(self) -> None:
        self.deaths = Deaths(self.spec.log_path)

    @property
    def is_running(self) -> bool:
        return self.family is not None and self.family.is_running


class Supervisor:
    """Keeps `specs` running. Use as a context manager: leaving it stops every process."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        max_restarts: int,
        limits: Limits = UNLIMITED,
        on_change: Callable[[Mapping[str, int]], None] = lambda pids: None,
    ) -> None:
        self._children = {spec.name: _Child(spec) for spec in specs}
        self._max_restarts = max_restarts
        self._limits = limits
        self._attention = Attention()
        self._on_change = on_change
        self._stop_reason: str | None = None

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def request_stop(self, reason: str) -> None:
        """Make `run` return soon; safe in a signal handler."""
        self._stop_reason = reason

    def run(self, on_tick: Callable[[], None] = lambda: None, *, tick_s: float = 0.2) -> None:
        """Supervise until the run ends, every process has finished, or a stop is requested.

        Raises:
            RunError: a process found a user's mistake, or died too often.
        """
        while self._stop_reason is None and not self.is_over:
            self._attention.look()
            for child in list(self._children.values()):
                self._look_after(child)
            on_tick()
            time.sleep(tick_s)

    def add(self, spec: ProcessSpec) -> None:
        """Add a process, which starts with the next tick. Its name must be free: see `names`."""
        if spec.name in self._children:
            raise RunError(f"there is a process {spec.name} already; choose another name")
        self._children[spec.name] = _Child(spec)

    def drain(self, name: str) -> None:
        """Ask a process to leave for good, without waiting. Its name is free again when `names` lacks it."""
        child = self._children[name]
        child.kill_at_s = time.monotonic() + child.spec.grace_s
        if child.family is not None and child.is_running:
            child.family.process.terminate()

    @property
    def names(self) -> dict[str, bool]:
        """The names of all processes, and whether each is to stay."""
        return {name: child.kill_at_s is None for name, child in self._children.items()}

    def pids(self) -> dict[str, int]:
        """Ids of the running processes, by name."""
        running = {name: child.family for name, child in self._children.items() if child.is_running}
        return {name: family.process.pid for name, family in running.items() if family is not None}

    def restarts(self) -> dict[str, int]:
        """How often each process died within the last ten minutes."""
        return {name: len(child.deaths_s) for name, child in self._children.items()}

    def stop(self, *, grace_s: float = 0.0) -> None:
        """End every process, after giving those that are leaving `grace_s` seconds."""
        until_s = time.monotonic() + grace_s
        while time.monotonic() < until_s and any(child.is_running for child in self._children.values()):
            time.sleep(0.1)
        grace_s = max((child.spec.grace_s for child in self._children.values()), default=0.0)
        families = [child.family for child in self._children.values() if child.family is not None]
        for pid in stop_processes([family.process for family in families], grace_s=grace_s):
            log.error(
                "process %d cannot be killed: the kernel holds it; look at its disk and its driver", pid
            )
        for family in families:
            family.bury()
        for child in self._children.values():
            child.family = None
            self._dismiss(child)
        self._on_change({})

    @property
    def is_over(self) -> bool:
        """Whether the learner has finished, or all processes have."""
        children = self._children.values()
        return any(child.finished and child.spec.ends_run for child in children) or all(
            child.finished for child in children
        )

    @property
    def _has_leader(self) -> bool:
        return any(child.spec.ends_run for child in self._children.values())

    def _look_after(self, child: _Child) -> None:
        if child.kill_at_s is not None:
            self._see_off(child, child.kill_at_s)
        elif child.family is not None and child.is_running:
            self._look_at(child, child.family)
            self._tend_standby(child)
        elif child.family is not None:
            self._bury(child, child.family)
        elif not child.finished and time.monotonic() >= child.start_at_s:
            self._start(child)

    def _look_at(self, child: _Child, family: _Family) -> None:
        """Kill a running process that makes no progress; after that it is handled like any dead process."""
        if child.hung is None:
            child.hung, child.hung_at_s = family.watch.look(self._attention.now_s), self._attention.now_s
            if child.hung is not None:
                log.error("%s hangs and is killed: %s", child.spec.name, child.hung)
                family.kill()
        elif self._attention.now_s - child.hung_at_s > _KILL_S:
            self._give_up(
                child,
                f"{child.spec.name} hangs ({child.hung}) and cannot be killed: the kernel holds process "
                f"{family.process.pid}; look at its disk and its driver (dmesg), and start the run again "
                "when it is gone",
            )

    def _see_off(self, child: _Child, kill_at_s: float) -> None:
        if child.family is not None and child.is_running:
            if time.monotonic() > kill_at_s:
                child.family.kill()
            return
        if child.family is not None:
            child.family.bury()
        self._leave_out(child, "left as it was asked to")

    def _leave_out(self, child: _Child, how: str) -> None:
        del self._children[child.spec.name]
        log.info("%s %s", child.spec.name, how)
        self._on_change(self.pids())

    def _give_up(self, child: _Child, reason: str) -> None:
        """Raise RunError, unless the run can go on without the process."""
        if not child.spec.is_extra:
            raise RunError(reason)
        log.error("%s", reason)
        self._leave_out(child, "is left out, the run goes on without it")

    def _start(self, child: _Child) -> None:
        try:
            child.family = self._called(child) or self._launch(
                child.spec, child.spec.argv, subprocess.DEVNULL
            )
        except OSError as error:  # no memory or process id: this is temporary and does not count as a death
            child.start_at_s = time.monotonic() + _BACKOFF.longest_s
            log.error(
                "%s cannot be started and is tried again in %.0f s: %s",
                child.spec.name,
                _BACKOFF.longest_s,
                error,
            )
            return
        child.hung = None
        child.standby_at_s = time.monotonic() + _STANDBY_AFTER_S
        log.info("%s started as process %d", child.spec.name, child.family.process.pid)
        self._on_change(self.pids())

    def _launch(self, spec: ProcessSpec, argv: Sequence[str], stdin: int) -> _Family:
        board = Board(spec.workers or (spec.name,))
        with _output(spec.log_path) as output, contextlib.ExitStack() as undo:
            undo.callback(board.close)
            process = subprocess.Popen(
                list(argv),
                env=dict(spec.env) | board.variable(0),
                stdin=stdin,
                bufsize=0,
                stdout=output,
                stderr=subprocess.STDOUT,
                # its own session, so that a terminal's Ctrl-C reaches only us and we can kill all its
                # children
                start_new_session=True,
                pass_fds=[board.descriptor],
            )
            undo.pop_all()
        return _Family(process, Watch(board, self._limits))

    def _tend_standby(self, child: _Child) -> None:
        if child.standby is not None and (hung := child.standby.watch.look(self._attention.now_s)):
            log.warning("the standby of %s hangs and is replaced: %s", child.spec.name, hung)
            self._dismiss(child)
        argv = child.spec.standby_argv
        if argv is None or time.monotonic() < child.standby_at_s:
            return
        if child.standby is None or not child.standby.is_running:
            self._dismiss(child)
            child.standby_at_s = time.monotonic() + _STANDBY_AFTER_S
            try:
                child.standby = self._launch(child.spec, argv, subprocess.PIPE)
            except OSError as error:
                log.warning(
                    "a standby of %s cannot be started and is tried again: %s", child.spec.name, error
                )
                return
            log.info("a standby of %s started as process %d", child.spec.name, child.standby.process.pid)

    def _called(self, child: _Child) -> _Family | None:
        """Activate the standby and return it; None if there is none that works."""
        standby = child.standby
        if standby is None or standby.process.stdin is None:
            return None
        if hung := standby.watch.look(self._attention.now_s):
            log.warning("the standby of %s hangs and is not used: %s", child.spec.name, hung)
            self._dismiss(child)
            return None
        try:
            with standby.process.stdin as pipe:
                pipe.write(b"\n")
        except BrokenPipeError:
            self._dismiss(child)
            return None
        child.standby = None
        return standby

    def _dismiss(self, child: _Child) -> None:
        """End the standby, if there is one."""
        standby, child.standby = child.standby, None
        if standby is None or standby.process.stdin is None:
            return
        standby.kill()
        standby.process.stdin.close()
        stop_processes([standby.process], grace_s=0.0)
        standby.watch.board.close()

    def _bury(self, child: _Child, family: _Family) -> None:
        status, child.family = family.process.returncode, None
        family.bury()
        if status == 0 and (child.spec.ends_run or not self._has_leader):
            child.finished = True
            log.info("%s finished", child.spec.name)
        elif status == 0:  # it was dismissed, perhaps by a learner that is restarted itself
            child.start_at_s = time.monotonic() + _LEFT_S
            log.info(
                "%s left; it is started again in %.0f s unless the run is over", child.spec.name, _LEFT_S
            )
        elif status == USER_ERROR:
            said = last_message(child.deaths.printed())
            self._give_up(child, said or f"{child.spec.name} refused to start; see {child.spec.log_path}")
        else:
            self._schedule_restart(child, status)
        self._on_change(self.pids())

    def _schedule_restart(self, child: _Child, status: int) -> None:
        now_s = time.monotonic()
        child.deaths_s.append(now_s)
        while now_s - child.deaths_s[0] > _RESTART_WINDOW_S:
            child.deaths_s.popleft()
        name, deaths, said = child.spec.name, len(child.deaths_s), child.deaths.note()
        cause = child.hung or (f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}")
        if status == FAULT_FOUND and min(child.deaths.in_a_row, deaths) >= SAME_FAULTS:
            self._give_up(
                child,
                f"{name} died {child.deaths.in_a_row} times in a row of the same fault, and would again: "
                f"{said}; correct that, then the same command resumes the run. {child.spec.log_path} has "
                "the rest",
            )
            return
        if deaths > self._max_restarts:
            self._give_up(
                child,
                f"{name} died {deaths} times within ten minutes (last: {cause}); control.max_restarts "
                f"allows {self._max_restarts}. Its last lines in "
                f"{child.spec.log_path}:\n{last_words(child.spec.log_path)}",
            )
            return
        delay_s = _BACKOFF.pause_s(deaths)
        child.start_at_s = now_s + delay_s
        last = f"; it last said: {said}" if said else ""
        log.warning(
            "%s died (%s)%s; restart %d of %d in %.1f s",
            name,
            cause,
            last,
            deaths,
            self._max_restarts,
            delay_s,
        )


def last_words(path: Path, lines: int = 15) -> str:
    """The end of a log file, for messages."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def _output(path: Path) -> IO[bytes]:
    """The file for a process's output: its log, or our standard error if the log cannot be opened."""
    try:
        return path.open("ab")
    except OSError as error:
        log.warning("%s cannot be written (%s); what would stand there goes to standard error", path, error)
        return os.fdopen(os.dup(2), "wb")
