"""Waits of the tests: for what happens elsewhere, in virtual time, and the hangs that tests are about.

No other file of the tests sleeps: `tests/unit/test_test_layout.py` checks it.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterable
from time import monotonic as real_s
from typing import Any, TypeVar
from unittest import mock

import psutil

T = TypeVar("T")
LONG_S = 120.0
"""A bound that a loaded machine keeps."""
_LOOK_S = 0.02

HANG = "import threading; threading.Event().wait(600)"
"""A statement that hangs, for the text of a program; the program of a killed test still ends."""


def hang() -> None:
    """Hang, as `HANG` does, where the function of a test shall hang."""
    time.sleep(600)


def _in_vain() -> object:
    return "waited in vain"


def wait_until(
    condition: Callable[[], object], within_s: float = LONG_S, seen: Callable[[], object] = _in_vain
) -> None:
    """Fail with `seen` after `within_s`."""
    assert comes_true(lambda: _is_true(condition), within_s), seen()


async def until(
    condition: Callable[[], object], within_s: float = LONG_S, seen: Callable[[], object] = _in_vain
) -> None:
    """Fail with `seen` after `within_s` of the event loop's time, which may be virtual."""
    now_s = asyncio.get_running_loop().time
    until_s = now_s() + within_s
    while not _is_true(condition):
        assert now_s() < until_s, seen()
        await asyncio.sleep(_LOOK_S / 4)


def comes_true(condition: Callable[[], object], within_s: float) -> bool:
    """Whether it does: for what shall not happen, with a short time; for what shall, with a long one."""
    until_s = real_s() + within_s
    while not (is_true := condition()) and real_s() < until_s:
        time.sleep(_LOOK_S)
    return bool(is_true)


def _is_true(condition: Callable[[], object]) -> bool:
    """What is waited for in a file is not true before there is one."""
    try:
        return bool(condition())
    except FileNotFoundError:
        return False


def has_ended(process: psutil.Process | int) -> bool:
    """Whether it is gone, or only its exit status is left."""
    try:
        one = psutil.Process(process) if isinstance(process, int) else process
        return not one.is_running() or one.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_ended(processes: Iterable[psutil.Process | int]) -> None:
    """Fail unless all of them end."""
    left = list(processes)
    wait_until(lambda: all(map(has_ended, left)), seen=lambda: [one for one in left if not has_ended(one)])


def stop(process: psutil.Process | int) -> None:
    """SIGSTOP, and wait until the process is stopped: of two signals the kernel delivers the lower one first."""
    one = psutil.Process(process) if isinstance(process, int) else process
    one.suspend()
    wait_until(lambda: has_ended(one) or one.status() == psutil.STATUS_STOPPED)


def still(condition: Callable[[], object], for_s: float, seen: Callable[[], object] = _in_vain) -> None:
    """Fail if the condition is violated within `for_s`: where nothing later shows that it held."""
    assert not comes_true(lambda: not condition(), for_s), seen()


def let_pass(seconds: float) -> None:
    """Let real time pass, where a test is about its passing; never to wait for something."""
    time.sleep(seconds)


async def elapse(seconds: float) -> None:
    """Let time of the event loop pass; all that the loop would do in it has been done then."""
    await asyncio.sleep(seconds)


async def turns(count: int) -> None:
    """Let the event loop turn `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


class _Jumps(selectors.DefaultSelector):
    """Nothing ready: the time of the next timer has come, unless threads are at work for the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.threads = real_s(), 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        waits = timeout is None or self.threads > 0
        began_s = real_s()
        found = super().select(timeout if waits else 0)
        self.now_s += real_s() - began_s if waits else 0.0 if found else max(timeout or 0.0, 0.0)
        return found


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._jumps.threads += 1
        future.add_done_callback(self._returned)
        return future

    def _returned(self, _: object) -> None:
        self._jumps.threads -= 1


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run it on a loop whose clock, and `time.monotonic`, jump to the next timer: no load disturbs its order.

    For work without sockets and processes. A thread that the loop waits for takes real time.
    """
    runner = asyncio.Runner(loop_factory=_VirtualLoop)
    with runner, mock.patch("time.monotonic", runner.get_loop().time):
        return runner.run(work)
