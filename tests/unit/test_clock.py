"""How the seconds of a generator are counted."""

import itertools

import pytest

from asyncrl.engine import duty
from asyncrl.engine.duty import Clock


class Time:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(duty.time, "monotonic", lambda: self.now_s)


def test_a_pause_and_an_idle_wait_for_weights_are_stalls_and_overlaps_count_once(monkeypatch):
    time = Time(monkeypatch)
    clock = Clock()
    for waiting, sampling, paused in itertools.product((0, 2), (0, 1), (False, True)):
        before = (clock.busy_s, clock.stalled_s)
        clock.waiting, clock.sampling = waiting, sampling
        clock.pause(paused)
        time.now_s += 3.0
        clock.settle()
        grown = (clock.busy_s - before[0], clock.stalled_s - before[1])
        stalls = paused or (waiting > 0 and not sampling)
        assert grown == (3.0 * sampling, 3.0 * stalls), (waiting, sampling, paused)


def test_what_begins_or_ends_is_counted_from_then_on(monkeypatch):
    time = Time(monkeypatch)
    clock = Clock()
    time.now_s += 1.0  # nothing to do
    with clock.wait():
        time.now_s += 2.0  # stalled
        with clock.group(1):
            time.now_s += 4.0  # busy, and the wait does no harm
            with clock.group(1):
                time.now_s += 8.0
            time.now_s += 16.0
        time.now_s += 32.0  # stalled
    time.now_s += 64.0
    with pytest.raises(RuntimeError), clock.group(1):
        time.now_s += 128.0
        raise RuntimeError
    clock.pause(True)
    time.now_s += 256.0
    clock.pause(True)  # a second failure in a row
    time.now_s += 512.0
    clock.pause(False)
    time.now_s += 1024.0
    clock.settle()
    assert (clock.busy_s, clock.stalled_s) == (4 + 8 + 16 + 128, 2 + 32 + 256 + 512)
