"""Processes that run blocking code in turn under one virtual clock: everything follows from the seed.

A process has threads (greenlets). A thread runs until it sleeps or waits for a reply; then the scheduler runs
the next event. A killed process executes nothing more, no `finally` either that would reach the store; a
paused one goes on later.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent, greenlet

from .violation import Violation


class Killed(BaseException):
    """Ends the threads of a killed process."""


@dataclass(eq=False, slots=True)
class Process:
    """One simulated process."""

    name: str
    is_alive: bool = True
    paused_until_s: float = 0.0
    threads: list[greenlet] = field(default_factory=list)


class Engine:
    """The clock, the events, and the one source of chance."""

    MOST_EVENTS = 400_000

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._hub = getcurrent()
        self._owner: dict[greenlet, Process] = {}

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do `action` later."""
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, action))

    def run(self, is_over: Callable[[], bool], deadline: Callable[[], float]) -> None:
        """Until the end, or a Violation when it does not come."""
        while not is_over():
            if not self._events or self.now_s > deadline() or self._count > self.MOST_EVENTS:
                raise Violation(f"no end is in sight at {self.now_s:.0f} s after {self._count} events")
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    # -- threads

    def start(self, process: Process, body: Callable[[], None]) -> None:
        """A new thread of `process`."""

        def guarded(_: Any) -> None:
            try:
                body()
            except Killed:
                pass
            finally:
                self._owner.pop(thread, None)
                process.threads.remove(thread)

        thread = greenlet(guarded, parent=self._hub)
        self._owner[thread] = process
        process.threads.append(thread)
        self.at(0.0, lambda: self._resume(thread, None))

    def sleep(self, seconds: float) -> None:
        """Called by a thread."""
        thread = getcurrent()
        self.at(max(0.0, seconds), lambda: self._resume(thread, None))
        self._wait()

    def wait(self) -> tuple[Callable[[float, Any], None], Callable[[], Any]]:
        """(answer, wait): the thread calls `wait`; the first `answer(delay, value)` gives it the value."""
        thread, answered = getcurrent(), []

        def answer(delay_s: float, value: Any) -> None:
            if not answered:
                answered.append(True)
                self.at(delay_s, lambda: self._resume(thread, value))

        return answer, self._wait

    def kill(self, process: Process) -> None:
        """As kill -9: called by the scheduler, never by a thread."""
        process.is_alive = False
        for thread in list(process.threads):
            if thread:
                thread.throw(Killed)
            else:  # has not begun
                process.threads.remove(thread)

    def exit(self) -> None:
        """A thread ends its process."""
        process = self.process
        process.is_alive = False
        self.at(0.0, lambda: self.kill(process))
        raise Killed

    @property
    def process(self) -> Process:
        """Of the running thread."""
        return self._owner[getcurrent()]

    def close(self) -> None:
        """End what is left."""
        for process in set(self._owner.values()):
            self.kill(process)

    def _wait(self) -> Any:
        value = self._hub.switch()
        if not self.process.is_alive:
            raise Killed
        return value

    def _resume(self, thread: greenlet, value: Any) -> None:
        process = self._owner.get(thread)
        if process is None or not process.is_alive or thread.dead:
            return
        if process.paused_until_s > self.now_s:
            self.at(process.paused_until_s - self.now_s, lambda: self._resume(thread, value))
        else:
            thread.switch(value)


@contextmanager
def virtual_time(engine: Engine, *modules: Any) -> Iterator[None]:
    """Let the shipped modules sleep in virtual time, and draw their unique ids from the seed."""
    clock = SimpleNamespace(monotonic=lambda: engine.now_s, time=lambda: engine.now_s, sleep=engine.sleep)
    unique = SimpleNamespace(uuid4=lambda: _Unique(engine.random.getrandbits(128)))
    replaced = [
        (module, name, new) for module in modules for name, new in (("time", clock), ("uuid", unique))
    ]
    kept = [(module, name, getattr(module, name)) for module, name, _ in replaced if hasattr(module, name)]
    for module, name, new in replaced:
        if hasattr(module, name):
            setattr(module, name, new)
    try:
        yield
    finally:
        for module, name, old in kept:
            setattr(module, name, old)


@dataclass(frozen=True, slots=True)
class _Unique:
    int: int

    @property
    def hex(self) -> str:
        return f"{self.int:032x}"
