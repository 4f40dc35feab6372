"""A host in virtual time. Its processes are generators, and its clock moves while a supervisor sleeps."""

import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from asyncrl.hosting.children import ProcessSpec, ThisHost
from asyncrl.hosting.progress import Pace, Sign
from asyncrl.hosting.supervisor import _RESTART_WINDOW_S, Supervisor

SIGKILL, SIGTERM = -9, -15
LONGEST_S = 1e6

# It yields the seconds that it sleeps, and returns the exit status.
Life = Generator[float, None, int]


class Terminated(Exception):
    """SIGTERM, thrown into a process that sleeps. One that does not catch it dies of it."""


class VirtualProcess:
    """A process and one child of its session. A program of a test calls `begin`, `beat` and `say`."""

    def __init__(self, host: "VirtualHost", spec: ProcessSpec, *, stands_by: bool) -> None:
        self.host, self.spec, self.pid = host, spec, next(host.pids)
        self.stands_by, self.is_called = stands_by, False
        self.has_child, self.is_closed = True, False
        self.is_held = False  # by the kernel: no signal ends it
        self.wakes_s = host.now_s()
        self.status: int | None = None
        self.began_s, self.ended_s = self.wakes_s, math.inf
        self._signs = {name: Sign(0, Pace.SLOW, "start") for name in spec.workers or (spec.name,)}
        self._life = host.programs[spec.name](self)

    # --- what its program calls -------------------------------------------------------------------------

    def begin(self, doing: str, pace: Pace = Pace.NORMAL, worker: str | None = None) -> None:
        name = worker or next(iter(self._signs))
        self._signs[name] = Sign(self._signs[name].count + 1, pace, doing)

    def beat(self, worker: str | None = None) -> None:
        sign = self._signs[worker or next(iter(self._signs))]
        self.begin(sign.doing, sign.pace, worker)

    def say(self, text: str) -> None:
        with self.spec.log_path.open("a") as file:
            file.write(f"{text}\n")

    # --- what its supervisor calls ----------------------------------------------------------------------

    def signs(self) -> Mapping[str, Sign]:
        assert not self.is_closed
        return dict(self._signs)

    def poll(self) -> int | None:
        return self.status

    def terminate(self) -> None:
        if self.status is None and not self.is_held and self.wakes_s < math.inf:
            self._advance(lambda: self._life.throw(Terminated()))

    def kill(self) -> None:
        if not self.is_held:
            self.has_child = False
            if self.status is None:
                self._end(SIGKILL)

    def take_over(self) -> None:
        assert self.stands_by and not self.is_called
        if self.status is not None:
            raise BrokenPipeError
        self.is_called = True

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    # --- what else happens to it ------------------------------------------------------------------------

    def stop(self) -> None:
        """As by SIGSTOP: it lives, and only SIGKILL reaches it."""
        self.wakes_s = math.inf

    def run(self) -> None:
        """Run until the next sleep."""
        self._advance(lambda: next(self._life))

    def _advance(self, resume: Callable[[], float]) -> None:
        try:
            self.wakes_s = self.host.now_s() + resume()
        except StopIteration as end:
            self._end(end.value)
        except Terminated:
            self._end(SIGTERM)

    def _end(self, status: int) -> None:
        self.status, self.ended_s, self.wakes_s = status, self.host.now_s(), math.inf


Program = Callable[[VirtualProcess], Life]


class VirtualHost(ThisHost):
    """A host whose `programs` say by the name of a process what it does."""

    def __init__(self, **programs: Program) -> None:
        self.programs = programs
        self.pids = itertools.count(1000)
        self.processes: list[VirtualProcess] = []  # all that were ever started
        self.refused_s: list[float] = []  # when a process could not be started
        self.refuses: Callable[[ProcessSpec, bool], bool] = lambda spec, stands_by: False
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, wait_s: float) -> None:
        until_s = self._now_s + wait_s
        assert until_s < LONGEST_S, "it goes on for ever"
        by_time = lambda process: process.wakes_s  # noqa: E731
        while self.processes and (first := min(self.processes, key=by_time)).wakes_s <= until_s:
            self._now_s = max(self._now_s, first.wakes_s)
            first.run()
        self._now_s = until_s

    def start(self, spec: ProcessSpec, *, stands_by: bool = False) -> VirtualProcess:
        if self.refuses(spec, stands_by):
            self.refused_s.append(self._now_s)
            raise BlockingIOError("no process id is free")
        self.processes.append(process := VirtualProcess(self, spec, stands_by=stands_by))
        return process

    def of(self, name: str, *, stands_by: bool = False) -> list[VirtualProcess]:
        """The processes that were started by that name, the oldest first."""
        return [one for one in self.processes if (one.spec.name, one.stands_by) == (name, stands_by)]

    @property
    def left(self) -> list[VirtualProcess]:
        """What a supervisor that has stopped left behind."""
        return [one for one in self.processes if one.status is None or one.has_child or not one.is_closed]


def works(me: VirtualProcess) -> Life:
    """Make progress for ever. As a standby, wait for the call first."""
    while me.stands_by and not me.is_called:
        me.begin("stand by", Pace.QUICK)
        yield 1.0
    me.begin("work")
    while True:
        me.beat()
        yield 1.0


def one(directory: Path, name: str = "learner", *, has_standby: bool = False, **more: object) -> ProcessSpec:
    """A process of a virtual host; its output is in the directory."""
    log_path, standby_argv = directory / f"{name}.log", ["-"] if has_standby else None
    return ProcessSpec(name=name, argv=["-"], env={}, log_path=log_path, standby_argv=standby_argv, **more)  # type: ignore[arg-type]


@contextmanager
def supervised(host: VirtualHost, *specs: ProcessSpec, **more: object) -> Iterator[Supervisor]:
    """Open a supervisor, which leaves nothing behind however it ends."""
    try:
        with Supervisor(specs, host=host, **{"max_restarts": 0, **more}) as supervisor:  # type: ignore[arg-type]
            yield supervisor
    finally:
        assert not host.left


def deaths(supervisor: Supervisor) -> dict[str, int]:
    """How often each process died within the time that `max_restarts` is for."""
    since_s, children = supervisor._host.now_s() - _RESTART_WINDOW_S, supervisor._children
    return {name: sum(at_s >= since_s for at_s in child.deaths_s) for name, child in children.items()}


def run_for(supervisor: Supervisor, wait_s: float) -> None:
    """Supervise for that long."""
    host = supervisor._host
    until_s = host.now_s() + wait_s
    run_until(supervisor, lambda: host.now_s() >= until_s, within_s=wait_s + 1.0)


def run_until(supervisor: Supervisor, condition: Callable[[], object], within_s: float = 3600.0) -> None:
    """Supervise until `condition`, at most `within_s` of virtual time."""
    host = supervisor._host
    ends_s = host.now_s() + within_s

    def tick() -> None:
        if condition():
            supervisor.request_stop("as expected")
        assert host.now_s() < ends_s, "it did not come to this"

    supervisor.run(tick)
    supervisor._stop_reason = None
