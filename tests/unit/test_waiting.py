"""The waits that other tests rely on."""

import asyncio
import threading
import time

import pytest

from tests.support.waiting import comes_true, elapse, in_virtual_time, still, until, wait_until


def test_virtual_time_is_exact_and_costs_none():
    async def scenario():
        began_s, order = time.monotonic(), []

        async def note(name, seconds):
            await elapse(seconds)
            order.append(name)

        await asyncio.gather(note("late", 1000.0), note("soon", 999.0), note("first", 0.001))
        assert order == ["first", "soon", "late"]
        with pytest.raises(AssertionError, match="waited in vain"):
            await until(lambda: False, within_s=50.0)
        return time.monotonic() - began_s

    began_s = time.monotonic()
    assert in_virtual_time(scenario()) == pytest.approx(1050.0, abs=0.01)
    assert time.monotonic() - began_s < 1000.0, "the clock is the real one again"


def test_timers_wait_for_the_threads_of_a_virtual_loop():
    goes_on = threading.Event()

    async def scenario():
        working = asyncio.create_task(asyncio.to_thread(goes_on.wait, 600))
        await elapse(0.01)
        goes_on.set()
        async with asyncio.timeout(100):
            return await working

    assert in_virtual_time(scenario())


def test_what_is_not_to_happen_fails_only_when_it_does():
    still(lambda: True, 0.05)
    seen = iter([True, False])
    with pytest.raises(AssertionError):
        still(lambda: next(seen), 600.0)
    assert comes_true(lambda: True, 0.0) and not comes_true(lambda: False, 0.0)


def test_a_file_that_is_waited_for_may_not_be_there_yet(tmp_path):
    file, looks = tmp_path / "late", iter([False, True])

    def says_so():
        if next(looks):
            file.write_text("now")
        return file.read_text() == "now"

    wait_until(says_so)
    file.unlink()
    looks = iter([False, True])
    in_virtual_time(until(says_so))
