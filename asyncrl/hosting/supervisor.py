"""Starts the processes of a run, restarts those that die or hang, and ends all of them with their children.

    starting -> running -> exited 0          its work is done
                   |  ^--- back-off --- died  restarted, at most `max_restarts` times in ten minutes
                   v                     ^--- silent for too long (see asyncrl/hosting/progress.py): killed
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
from asyncrl.hosting.deaths import Deaths, last_message
from asyncrl.hosting.processes import stop_processes
from asyncrl.hosting.progress import UNLIMITED, Attention, Board, Limits, Watch, variable
from asyncrl.hosting.workers import ending

log = logging.getLogger(__name__)

# Exit status of a process that found a user's mistake: it is not restarted.
USER_ERROR = 2
# Exit status of a process that found a fault which may recur: given up after `SAME_FAULTS` in a row.
FAULT_FOUND = 3
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
    is_extra: bool = False  # added while the run went on: if it fails too often, the run goes on without it
    standby_argv: Sequence[str] | None = None  # starts a standby, which takes over after a line on its stdin
    grace_s: float = 15.0  # seconds between SIGTERM and SIGKILL
    workers: Sequence[str] = ()  # names of its processes that report progress; default: only itself


@dataclass(slots=True)
class _Family:
    """A process with all its children, and the board on which they report progress."""

    process: subprocess.Popen[bytes]
    watch: Watch

    def kill(self) -> None:
        """Kill the whole session, also children of a dead process: engine cores, reward workers, senders."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def release(self) -> None:
        """Kill what is left after the process has ended, and close the board."""
        self.kill()
        self.watch.board.close()


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    deaths: Deaths
    family: _Family | None = None
    standby: _Family | None = None
    standby_at_s: float = 0.0
    hung: str | None = None  # why it was killed
    hung_at_s: float = 0.0
    deaths_s: deque[float] = field(default_factory=deque)
    start_at_s: float = 0.0
    finished: bool = False
    kill_at_s: float | None = None  # when to kill it, if it was asked to leave

    @property
    def running(self) -> _Family | None:
        """The family, while its first process is alive."""
        return self.family if self.family and self.family.process.poll() is None else None


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
        self._children: dict[str, _Child] = {}
        self._max_restarts, self._limits, self._on_change = max_restarts, limits, on_change
        self._attention = Attention()
        self._stop_reason: str | None = None
        for spec in specs:
            self.add(spec)

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def request_stop(self, reason: str) -> None:
        """Make `run` return soon; safe in a signal handler."""
        self._stop_reason = reason

    def run(self, on_tick: Callable[[], None] = lambda: None, *, tick_s: float = 0.2) -> None:
        """Supervise until the run ends, all processes finish, or a stop is requested. Raises RunError."""
        while self._stop_reason is None and not self.is_over:
            self._attention.look()
            for child in list(self._children.values()):
                self._supervise(child)
            on_tick()
            time.sleep(tick_s)

    def add(self, spec: ProcessSpec) -> None:
        """Add a process, which starts with the next tick. Its name must be free: see `names`."""
        if spec.name in self._children:
            raise RunError(f"there is a process {spec.name} already; choose another name")
        self._children[spec.name] = _Child(spec, Deaths(spec.log_path))

    def drain(self, name: str) -> None:
        """Ask a process to leave for good, without waiting. Its name is free again when `names` lacks it."""
        child = self._children[name]
        child.kill_at_s = time.monotonic() + child.spec.grace_s
        if running := child.running:
            running.process.terminate()

    @property
    def names(self) -> dict[str, bool]:
        """The names of all processes, and whether each is to stay."""
        return {name: child.kill_at_s is None for name, child in self._children.items()}

    def pids(self) -> dict[str, int]:
        """Ids of the running processes, by name."""
        return {name: run.process.pid for name, child in self._children.items() if (run := child.running)}

    def deaths(self) -> dict[str, int]:
        """How often each process died within the last ten minutes."""
        return {name: len(child.deaths_s) for name, child in self._children.items()}

    def stop(self, *, grace_s: float = 0.0) -> None:
        """End every process, after giving those that are leaving `grace_s` seconds."""
        until_s = time.monotonic() + grace_s
        while time.monotonic() < until_s and self.pids():
            time.sleep(0.1)
        grace_s = max((child.spec.grace_s for child in self._children.values()), default=0.0)
        families = [child.family for child in self._children.values() if child.family is not None]
        for pid in stop_processes([family.process for family in families], grace_s=grace_s):
            log.error("process %d cannot be killed: the kernel holds it; look at its disk and driver", pid)
        for family in families:
            family.release()
        for child in self._children.values():
            child.family = None
            self._end_standby(child)
        self._on_change({})

    @property
    def is_over(self) -> bool:
        """Whether the learner has finished, or all processes have."""
        children = self._children.values()
        return any(child.finished and child.spec.ends_run for child in children) or all(
            child.finished for child in children
        )

    def _supervise(self, child: _Child) -> None:
        running = child.running
        if child.kill_at_s is not None:
            if running is None:
                self._remove(child, "left as it was asked to")
            elif time.monotonic() > child.kill_at_s:
                running.kill()
        elif running is not None:
            self._check_progress(child, running)
            self._keep_standby(child)
        elif child.family is not None:
            self._handle_exit(child, child.family)
        elif not child.finished and time.monotonic() >= child.start_at_s:
            self._start(child)

    def _check_progress(self, child: _Child, family: _Family) -> None:
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

    def _remove(self, child: _Child, how: str) -> None:
        if child.family is not None:
            child.family.release()
        del self._children[child.spec.name]
        log.info("%s %s", child.spec.name, how)
        self._on_change(self.pids())

    def _give_up(self, child: _Child, reason: str) -> None:
        """Raise RunError, unless the run can go on without the process."""
        if not child.spec.is_extra:
            raise RunError(reason)
        log.error("%s", reason)
        self._remove(child, "is left out, the run goes on without it")

    def _start(self, child: _Child) -> None:
        spec = child.spec
        try:
            child.family = self._activate_standby(child) or self._launch(spec, spec.argv, subprocess.DEVNULL)
        except OSError as error:  # no memory or process id: this is temporary and does not count as a death
            wait_s = _BACKOFF.longest_s
            child.start_at_s = time.monotonic() + wait_s
            log.error("%s cannot be started and is tried again in %.0f s: %s", spec.name, wait_s, error)
            return
        child.hung = None
        child.standby_at_s = time.monotonic() + _STANDBY_AFTER_S
        log.info("%s started as process %d", spec.name, child.family.process.pid)
        self._on_change(self.pids())

    def _launch(self, spec: ProcessSpec, argv: Sequence[str], stdin: int) -> _Family:
        board = Board(spec.workers or (spec.name,))
        with _output(spec.log_path) as output, contextlib.ExitStack() as undo:
            undo.callback(board.close)
            process = subprocess.Popen(
                list(argv),
                env=dict(spec.env) | variable(board.descriptor, 0),
                stdin=stdin,
                bufsize=0,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A terminal's Ctrl-C does not reach another session, and all processes in it can be killed.
                start_new_session=True,
                pass_fds=[board.descriptor],
            )
            undo.pop_all()
        return _Family(process, Watch(board, self._limits))

    def _keep_standby(self, child: _Child) -> None:
        """Start a standby when it is time, and replace one that hangs or has died."""
        name, argv = child.spec.name, child.spec.standby_argv
        if child.standby is not None and (hung := child.standby.watch.look(self._attention.now_s)):
            log.warning("the standby of %s hangs and is replaced: %s", name, hung)
            self._end_standby(child)
        if argv is None or time.monotonic() < child.standby_at_s:
            return
        if child.standby is None or child.standby.process.poll() is not None:
            self._end_standby(child)
            child.standby_at_s = time.monotonic() + _STANDBY_AFTER_S
            try:
                child.standby = self._launch(child.spec, argv, subprocess.PIPE)
            except OSError as error:
                log.warning("a standby of %s cannot be started and is tried again: %s", name, error)
                return
            log.info("a standby of %s started as process %d", name, child.standby.process.pid)

    def _activate_standby(self, child: _Child) -> _Family | None:
        """Let the standby take over and return it; None if there is none that works."""
        standby = child.standby
        if standby is None or standby.process.stdin is None:
            return None
        if hung := standby.watch.look(self._attention.now_s):
            log.warning("the standby of %s hangs and is not used: %s", child.spec.name, hung)
            self._end_standby(child)
            return None
        try:
            with standby.process.stdin as pipe:
                pipe.write(b"\n")
        except BrokenPipeError:
            self._end_standby(child)
            return None
        child.standby = None
        return standby

    def _end_standby(self, child: _Child) -> None:
        standby, child.standby = child.standby, None
        if standby is None or standby.process.stdin is None:
            return
        standby.kill()
        standby.process.stdin.close()
        stop_processes([standby.process], grace_s=0.0)
        standby.watch.board.close()

    def _handle_exit(self, child: _Child, family: _Family) -> None:
        """Clean up after a process that has ended, and decide whether it is started again."""
        spec, status, child.family = child.spec, family.process.returncode, None
        family.release()
        run_has_end = any(other.spec.ends_run for other in self._children.values())
        if status == 0 and (spec.ends_run or not run_has_end):
            child.finished = True
            log.info("%s finished", spec.name)
        elif status == 0:  # the learner dismissed it, and may be restarting itself
            child.start_at_s = time.monotonic() + _LEFT_S
            log.info("%s left; it is started again in %.0f s unless the run is over", spec.name, _LEFT_S)
        elif status == USER_ERROR:
            message = last_message(child.deaths.printed())
            self._give_up(child, message or f"{spec.name} refused to start; see {spec.log_path}")
        else:
            self._schedule_restart(child, status)
        self._on_change(self.pids())

    def _schedule_restart(self, child: _Child, status: int) -> None:
        now_s = time.monotonic()
        child.deaths_s.append(now_s)
        while now_s - child.deaths_s[0] > _RESTART_WINDOW_S:
            child.deaths_s.popleft()
        name, path, deaths, last = (
            child.spec.name,
            child.spec.log_path,
            len(child.deaths_s),
            child.deaths.note(),
        )
        cause = child.hung or ending(status)
        if status == FAULT_FOUND and min(child.deaths.in_a_row, deaths) >= SAME_FAULTS:
            self._give_up(
                child,
                f"{name} died {child.deaths.in_a_row} times in a row of the same fault, and would again: "
                f"{last}; correct that, then the same command resumes the run. {path} has the rest",
            )
        elif deaths > self._max_restarts:
            self._give_up(
                child,
                f"{name} died {deaths} times within ten minutes (last: {cause}); control.max_restarts allows "
                f"{self._max_restarts}. Its last lines in {path}:\n{_last_lines(path)}",
            )
        else:
            delay_s = _BACKOFF.pause_s(deaths)
            child.start_at_s = now_s + delay_s
            said = f"; its last message: {last}" if last else ""
            log.warning(
                "%s died (%s)%s; restart %d of %d in %.1f s",
                *(name, cause, said, deaths, self._max_restarts, delay_s),
            )


def _last_lines(path: Path, lines: int = 15) -> str:
    """The end of a log file."""
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
        log.warning("%s cannot be written (%s); the output goes to standard error", path, error)
        return os.fdopen(os.dup(2), "wb")
