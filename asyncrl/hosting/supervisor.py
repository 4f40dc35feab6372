"""Starts the processes of a run, restarts those that die or hang, and ends all of them with their children.

    starting -> running -> exited 0          its work is done
                   |  ^--- back-off --- died  restarted, at most `max_restarts` times in ten minutes
                   v                     ^--- silent for too long (see asyncrl/hosting/progress.py): killed
                given up                     the whole run stops with a message

A process that exits with `USER_ERROR` is not restarted, because it would find the same mistake again.
Processes may be added and drained while the run goes on.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from asyncrl.backoff import Backoff
from asyncrl.errors import RunError
from asyncrl.hosting.children import Process, ProcessSpec, ThisHost
from asyncrl.hosting.deaths import Deaths, last_message
from asyncrl.hosting.progress import UNLIMITED, Attention, Limits, Watch
from asyncrl.hosting.workers import ending

log = logging.getLogger(__name__)

# Exit status of a process that found a user's mistake: it is not restarted.
USER_ERROR = 2
# Exit status of a process that found a fault which may recur: given up after `SAME_FAULTS` in a row.
FAULT_FOUND = 3
SAME_FAULTS = 3
_RESTART_WINDOW_S = 600.0
_BACKOFF = Backoff(0.5, 15.0)
_TICK_S = 0.2
_LEFT_S = 10.0
_REAP_S = 10.0  # a process that was killed ends within this, unless the kernel holds it
_KILL_S = 60.0  # a killed process that exists after this long is held in the kernel, by a driver or a disk
_STANDBY_AFTER_S = 60.0  # pause before a standby starts: the start of a run is the machine's busiest time


@dataclass(slots=True)
class _Watched:
    """A process with all its children, and the watch over their progress."""

    process: Process
    watch: Watch

    def release(self) -> None:
        """Kill what is left after the process has ended, and release what the host holds for it."""
        self.process.kill()
        self.process.close()


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    deaths: Deaths
    family: _Watched | None = None
    standby: _Watched | None = None
    standby_at_s: float = 0.0
    hung: str | None = None  # why it was killed
    hung_at_s: float = 0.0
    deaths_s: deque[float] = field(default_factory=deque)
    started_s: float = 0.0
    start_at_s: float = 0.0
    finished: bool = False
    kill_at_s: float | None = None  # when to kill it, if it was asked to leave

    @property
    def running(self) -> _Watched | None:
        """The family, while its first process is alive."""
        return self.family if self.family and self.family.process.poll() is None else None


class Supervisor(AbstractContextManager["Supervisor"]):
    """Keeps `specs` running. Use as a context manager: leaving it stops every process."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        max_restarts: int,
        limits: Limits = UNLIMITED,
        on_change: Callable[[Mapping[str, int]], None] = lambda pids: None,
        host: ThisHost | None = None,
    ) -> None:
        self._children: dict[str, _Child] = {}
        self._max_restarts, self._limits, self._on_change = max_restarts, limits, on_change
        self._host = host or ThisHost()
        self._attention = Attention(self._host.now_s)
        self._stop_reason: str | None = None
        self._ends_now = False
        for spec in specs:
            self.add(spec)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def request_stop(self, reason: str) -> None:
        """Make `run` return soon; safe in a signal handler."""
        self._stop_reason = reason

    def end_now(self) -> None:
        """Make `stop` wait for no process to leave or to save; safe in a signal handler."""
        self._ends_now = True

    def run(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Supervise until the run ends, all processes finish, or a stop is requested. Raises RunError."""
        while self._stop_reason is None and not self.is_over:
            self._attention.look()
            for child in list(self._children.values()):
                self._supervise(child)
            on_tick()
            self._host.sleep(_TICK_S)

    def add(self, spec: ProcessSpec) -> None:
        """Add a process, which starts with the next tick. Its name must be free: see `names`."""
        if spec.name in self._children:
            raise RunError(f"there is a process {spec.name} already; choose another name")
        self._children[spec.name] = _Child(spec, Deaths(spec.log_path))

    def drain(self, name: str) -> None:
        """Ask a process to leave for good, without waiting. Its name is free again when `names` lacks it."""
        child = self._children[name]
        child.kill_at_s = self._host.now_s() + child.spec.grace_s
        if running := child.running:
            running.process.terminate()

    @property
    def names(self) -> dict[str, bool]:
        """The names of all processes, and whether each is to stay."""
        return {name: child.kill_at_s is None for name, child in self._children.items()}

    def pids(self) -> dict[str, int]:
        return {name: run.process.pid for name, child in self._children.items() if (run := child.running)}

    @property
    def doing(self) -> str | None:
        """What the process that ends the run, of ranks the first, reported last; None if it does not run."""
        lead = next((child.running for child in self._children.values() if child.spec.ends_run), None)
        return list(lead.process.signs().values())[:2][-1].doing if lead else None

    def stop(
        self, *, leave_s: float = 0.0, save_s: float = 0.0, on_tick: Callable[[], None] = lambda: None
    ) -> None:
        """End every process, after giving those that are leaving `leave_s` seconds.

        Each has the `grace_s` of its specification between SIGTERM and SIGKILL, and the process that ends the
        run at least `save_s`. `on_tick` is called all the time.
        """

        def goes_on() -> bool:
            on_tick()
            return not self._ends_now

        grace_s = {
            child.spec.name: max(child.spec.grace_s, save_s if child.spec.ends_run else 0.0)
            for child in self._children.values()
        }
        left = {name: child.family for name, child in self._children.items() if child.family is not None}
        families = list(left.values())
        self._wait(families, leave_s, goes_on)
        for family in families:
            family.process.terminate()
        asked_s = self._host.now_s()
        for name in sorted(left, key=grace_s.__getitem__):
            self._wait([left[name]], asked_s + grace_s[name] - self._host.now_s(), goes_on)
            left[name].process.kill()
        self._wait(families, _REAP_S)
        for family in families:
            if family.process.poll() is None:
                held = "process %d cannot be killed: the kernel holds it; look at its disk and driver"
                log.error(held, family.process.pid)
            family.release()
        for child in self._children.values():
            child.family = None
            self._end_standby(child)
        self._on_change({})

    def _wait(
        self, families: Iterable[_Watched], wait_s: float, goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Wait until all have ended, at most `wait_s` and while `goes_on()`."""
        until_s = self._host.now_s() + wait_s
        while self._host.now_s() < until_s and any(family.process.poll() is None for family in families):
            if not goes_on():
                return
            self._host.sleep(0.02)

    @property
    def is_over(self) -> bool:
        """Whether the learner has finished, or all processes that can have."""
        children = self._children.values()
        return any(child.finished and child.spec.ends_run for child in children) or all(
            child.finished or child.spec.serves for child in children
        )

    def _supervise(self, child: _Child) -> None:
        running = child.running
        if child.kill_at_s is not None:
            if running is None:
                self._remove(child, "left as it was asked to")
            elif self._host.now_s() > child.kill_at_s:
                running.process.kill()
        elif running is not None:
            self._check_progress(child, running)
            self._keep_standby(child)
        elif child.family is not None and (status := child.family.process.poll()) is not None:
            self._handle_exit(child, child.family, status)
        elif not child.finished and self._host.now_s() >= child.start_at_s:
            self._start(child)

    def _check_progress(self, child: _Child, family: _Watched) -> None:
        """Kill a running process that makes no progress; after that it is handled like any dead process."""
        if child.hung is None:
            child.hung, child.hung_at_s = family.watch.look(self._attention.now_s), self._attention.now_s
            if child.hung is not None:
                log.error("%s hangs and is killed: %s", child.spec.name, child.hung)
                family.process.kill()
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
        others = (other for other in self._children.values() if other is not child and other.running)
        if not child.spec.is_extra and (child.spec.kind or None) not in {other.spec.kind for other in others}:
            raise RunError(reason.removeprefix("RunError: "))  # which the command line prints first
        log.error("%s", reason)
        self._remove(child, "is left out, the run goes on without it")

    def _start(self, child: _Child) -> None:
        spec = child.spec
        try:
            child.family = self._activate_standby(child) or self._launch(spec)
        except OSError as error:  # no memory or process id: this is temporary and does not count as a death
            wait_s = _BACKOFF.longest_s
            child.start_at_s = self._host.now_s() + wait_s
            log.error("%s cannot be started and is tried again in %.0f s: %s", spec.name, wait_s, error)
            return
        child.hung, child.started_s = None, self._host.now_s()
        child.standby_at_s = child.started_s + _STANDBY_AFTER_S
        log.info("%s started as process %d", spec.name, child.family.process.pid)
        self._on_change(self.pids())

    def _launch(self, spec: ProcessSpec, *, stands_by: bool = False) -> _Watched:
        process = self._host.start(spec, stands_by=stands_by)
        return _Watched(process, Watch(process.signs, self._limits))

    def _keep_standby(self, child: _Child) -> None:
        """Start a standby when it is time, and replace one that hangs or has died."""
        name = child.spec.name
        if child.standby is not None and (hung := child.standby.watch.look(self._attention.now_s)):
            log.warning("the standby of %s hangs and is replaced: %s", name, hung)
            self._end_standby(child)
        if child.spec.standby_argv is None or self._host.now_s() < child.standby_at_s:
            return
        if child.standby is None or child.standby.process.poll() is not None:
            self._end_standby(child)
            child.standby_at_s = self._host.now_s() + _STANDBY_AFTER_S
            try:
                child.standby = self._launch(child.spec, stands_by=True)
            except OSError as error:
                log.warning("a standby of %s cannot be started and is tried again: %s", name, error)
                return
            log.info("a standby of %s started as process %d", name, child.standby.process.pid)

    def _activate_standby(self, child: _Child) -> _Watched | None:
        """Let the standby take over and return it; None if there is none that works."""
        standby = child.standby
        if standby is None:
            return None
        try:
            standby.process.take_over()
        except BrokenPipeError:
            self._end_standby(child)
            return None
        child.standby = None
        return standby

    def _end_standby(self, child: _Child) -> None:
        standby, child.standby = child.standby, None
        if standby is not None:
            standby.process.kill()
            self._wait([standby], _REAP_S)
            standby.process.close()

    def _handle_exit(self, child: _Child, family: _Watched, status: int) -> None:
        """Clean up after a process that has ended, and decide whether it is started again."""
        spec, child.family = child.spec, None
        family.release()
        run_has_end = any(other.spec.ends_run for other in self._children.values())
        if status == 0 and (spec.ends_run or not run_has_end):
            child.finished = True
            log.info("%s finished", spec.name)
        elif status == 0:  # the learner dismissed it, and may be restarting itself
            child.start_at_s = self._host.now_s() + _LEFT_S
            log.info("%s left; it is started again in %.0f s unless the run is over", spec.name, _LEFT_S)
        elif status == USER_ERROR:
            message = last_message(child.deaths.printed())
            self._give_up(child, message or f"{spec.name} refused to start; see {spec.log_path}")
        else:
            self._schedule_restart(child, status)
        self._on_change(self.pids())

    def _schedule_restart(self, child: _Child, status: int) -> None:
        now_s = self._host.now_s()
        child.deaths_s.append(now_s)
        while now_s - child.deaths_s[0] > _RESTART_WINDOW_S:
            child.deaths_s.popleft()
        name, path = child.spec.name, child.spec.log_path
        deaths, last = len(child.deaths_s), child.deaths.note()
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
                f"{self._max_restarts}. Its last lines in {path}:\n{child.deaths.last_lines}",
            )
        else:
            # From the last start: a process that has worked for longer than the pause is started immediately.
            delay_s = max(0.0, child.started_s + _BACKOFF.pause_s(deaths) - now_s)
            child.start_at_s = now_s + delay_s
            said = f"; its last message: {last}" if last else ""
            log.warning(
                "%s died (%s)%s; restart %d of %d in %.1f s",
                *(name, cause, said, deaths, self._max_restarts, delay_s),
            )
