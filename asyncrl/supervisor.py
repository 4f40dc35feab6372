"""Starts the processes of a run, restarts the ones that die, and leaves nothing behind.

    starting -> running -> exited 0          its work is done
                   |  ^--- back-off --- died  restarted, at most `max_restarts` times in ten minutes
                   v
                given up                     the whole run stops and says why

A process that exits with `USER_ERROR` made its point already: restarting would only repeat it. Processes may be added and
drained while the run goes on.
"""

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

from asyncrl.errors import RunError
from asyncrl.processes import stop_process

log = logging.getLogger(__name__)

USER_ERROR = 2
"""Exit status of a process that found a mistake of the user's: never restarted."""
_RESTART_WINDOW_S = 600.0
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 15.0
_LEFT_S = 10.0
_REAP_S = 10.0
_STANDBY_AFTER_S = 60.0
"""A start is the busiest time of a machine; a standby that cannot live is not tried more often than this either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to keep alive."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    ends_run: bool = False
    """True for the learner: its exit with status 0 ends the run."""
    is_extra: bool = False
    """True for what was added while the run went on: it is left out where others would end the run."""
    standby_argv: Sequence[str] | None = None
    """Starts one that waits beside it, and takes its place when told to (a line on stdin). None: there is none."""
    grace_s: float = 15.0
    """Between SIGTERM and SIGKILL."""


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    process: subprocess.Popen[bytes] | None = None
    standby: subprocess.Popen[bytes] | None = None
    standby_at_s: float = 0.0
    deaths_s: deque[float] = field(default_factory=deque)
    start_at_s: float = 0.0
    finished: bool = False
    kill_at_s: float | None = None
    """Set when it was asked to leave."""

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Keeps `specs` running. Use as a context manager: leaving it stops every process."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        max_restarts: int,
        on_change: Callable[[Mapping[str, int]], None] = lambda pids: None,
    ) -> None:
        self._children = {spec.name: _Child(spec) for spec in specs}
        self._max_restarts = max_restarts
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
            for child in list(self._children.values()):
                self._look_after(child)
            on_tick()
            time.sleep(tick_s)

    def add(self, spec: ProcessSpec) -> None:
        """One process more, from the next tick on. Its name must be free: see `names`."""
        if spec.name in self._children:
            raise RunError(f"there is a process {spec.name} already; choose another name")
        self._children[spec.name] = _Child(spec)

    def drain(self, name: str) -> None:
        """Ask a process to leave; it is not started again. Returns at once; its name is free when `names` lacks it."""
        child = self._children[name]
        child.kill_at_s = time.monotonic() + child.spec.grace_s
        if child.process is not None and child.is_running:
            child.process.terminate()

    @property
    def names(self) -> dict[str, bool]:
        """Everybody there is, and whether they stay."""
        return {name: child.kill_at_s is None for name, child in self._children.items()}

    def pids(self) -> dict[str, int]:
        """Process ids of what is running now, by name."""
        return {
            name: child.process.pid for name, child in self._children.items() if child.process is not None and child.is_running
        }

    def restarts(self) -> dict[str, int]:
        """How often each process died within the last ten minutes."""
        return {name: len(child.deaths_s) for name, child in self._children.items()}

    def stop(self, *, grace_s: float = 0.0) -> None:
        """End every process, after letting those that are about to leave do so for `grace_s`."""
        until_s = time.monotonic() + grace_s
        while time.monotonic() < until_s and any(child.is_running for child in self._children.values()):
            time.sleep(0.1)
        running = [child for child in self._children.values() if child.is_running]
        for child in running:
            assert child.process is not None
            child.process.terminate()
        for child in running:
            assert child.process is not None
            stop_process(child.process, grace_s=child.spec.grace_s)
        for child in self._children.values():
            _kill_session(child.process)
            _end(child.standby)
        self._on_change({})

    @property
    def is_over(self) -> bool:
        """The learner has finished, or everybody has."""
        children = self._children.values()
        return any(child.finished and child.spec.ends_run for child in children) or all(child.finished for child in children)

    @property
    def _has_leader(self) -> bool:
        return any(child.spec.ends_run for child in self._children.values())

    def _look_after(self, child: _Child) -> None:
        if child.kill_at_s is not None:
            self._see_off(child, child.kill_at_s)
            return
        if child.is_running:
            self._tend_standby(child)
            return
        if child.finished:
            return
        if child.process is not None:
            self._bury(child)
        if not child.finished and child.process is None and time.monotonic() >= child.start_at_s:
            self._start(child)

    def _see_off(self, child: _Child, kill_at_s: float) -> None:
        if child.process is not None and child.is_running:
            if time.monotonic() > kill_at_s:
                child.process.kill()
            return
        _kill_session(child.process)
        self._leave_out(child, "left as it was asked to")

    def _leave_out(self, child: _Child, how: str) -> None:
        del self._children[child.spec.name]
        log.info("%s %s", child.spec.name, how)
        self._on_change(self.pids())

    def _give_up(self, child: _Child, reason: str) -> None:
        """Raises RunError, unless the run can do without it."""
        if not child.spec.is_extra:
            raise RunError(reason)
        log.error("%s", reason)
        self._leave_out(child, "is left out, the run goes on without it")

    def _start(self, child: _Child) -> None:
        child.process = _called(child.standby) or _launch(child.spec, child.spec.argv, subprocess.DEVNULL)
        child.standby, child.standby_at_s = None, time.monotonic() + _STANDBY_AFTER_S
        log.info("%s started as process %d", child.spec.name, child.process.pid)
        self._on_change(self.pids())

    def _tend_standby(self, child: _Child) -> None:
        argv = child.spec.standby_argv
        if argv is None or time.monotonic() < child.standby_at_s:
            return
        if child.standby is None or child.standby.poll() is not None:
            _end(child.standby)
            child.standby = _launch(child.spec, argv, subprocess.PIPE)
            child.standby_at_s = time.monotonic() + _STANDBY_AFTER_S
            log.info("a standby of %s started as process %d", child.spec.name, child.standby.pid)

    def _bury(self, child: _Child) -> None:
        assert child.process is not None
        status = child.process.returncode
        _kill_session(child.process)
        child.process = None
        if status == 0 and (child.spec.ends_run or not self._has_leader):
            child.finished = True
            log.info("%s finished", child.spec.name)
        elif status == 0:  # sent home, perhaps by a learner that is itself restarted
            child.start_at_s = time.monotonic() + _LEFT_S
            log.info("%s left; it is started again in %.0f s unless the run is over", child.spec.name, _LEFT_S)
        elif status == USER_ERROR:
            said = last_words(child.spec.log_path)
            self._give_up(child, said or f"{child.spec.name} refused to start; see {child.spec.log_path}")
        else:
            self._schedule_restart(child, status)
        self._on_change(self.pids())

    def _schedule_restart(self, child: _Child, status: int) -> None:
        now_s = time.monotonic()
        child.deaths_s.append(now_s)
        while now_s - child.deaths_s[0] > _RESTART_WINDOW_S:
            child.deaths_s.popleft()
        name, deaths = child.spec.name, len(child.deaths_s)
        cause = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        if deaths > self._max_restarts:
            self._give_up(
                child,
                f"{name} died {deaths} times within ten minutes (last: {cause}); control.max_restarts allows "
                f"{self._max_restarts}. Its last lines in {child.spec.log_path}:\n{last_words(child.spec.log_path)}",
            )
            return
        delay_s = min(_FIRST_BACKOFF_S * 2 ** (deaths - 1), _LONGEST_BACKOFF_S)
        child.start_at_s = now_s + delay_s
        log.warning("%s died (%s); restart %d of %d in %.1f s", name, cause, deaths, self._max_restarts, delay_s)


def last_words(path: Path, lines: int = 15) -> str:
    """The end of a log file, for a message to the user."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def _launch(spec: ProcessSpec, argv: Sequence[str], stdin: int) -> subprocess.Popen[bytes]:
    with _output(spec.log_path) as output:
        return subprocess.Popen(
            list(argv),
            env=dict(spec.env),
            stdin=stdin,
            bufsize=0,
            stdout=output,
            stderr=subprocess.STDOUT,
            # its own session: a terminal's Ctrl-C reaches only us, and we can end its whole family
            start_new_session=True,
        )


def _output(path: Path) -> IO[bytes]:
    """Where a process prints to: our own standard error when its log cannot be opened, for which no run need end."""
    try:
        return path.open("ab")
    except OSError as error:
        log.warning("%s cannot be written (%s); what would stand there goes to standard error", path, error)
        return os.fdopen(os.dup(2), "wb")


def _called(standby: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes] | None:
    """The standby, told that it is needed; None when there is none that lives."""
    if standby is None or standby.stdin is None:
        return None
    try:
        with standby.stdin as pipe:
            pipe.write(b"\n")
    except BrokenPipeError:
        _end(standby)
        return None
    return standby


def _end(standby: subprocess.Popen[bytes] | None) -> None:
    if standby is not None and standby.stdin is not None:
        _kill_session(standby)
        standby.stdin.close()
        standby.wait(timeout=_REAP_S)


def _kill_session(process: subprocess.Popen[bytes] | None) -> None:
    """Kill what a dead process left in its session: engine cores, reward workers, senders."""
    if process is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
