"""Ranks end together, and the status of the one that knows the cause is the one that counts."""

import signal
import subprocess
import sys

import pytest

from asyncrl.hosting.supervisor import USER_ERROR
from asyncrl.launch import ranks
from asyncrl.launch.ranks import begin, end_ranks, wait_for_ranks


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class FakeRank:
    """Exits with `status` at `at_s`; after SIGTERM, `leave_s` later."""

    def __init__(self, clock: Clock, status: int = 0, at_s: float = 1e9, leave_s: float = 1e9) -> None:
        self.clock, self.status, self.at_s, self.leave_s = clock, status, at_s, leave_s
        self.terminated_at_s: float | None = None
        self.killed = False

    def poll(self) -> int | None:
        return self.status if self.clock.now_s >= self.at_s else None

    def terminate(self) -> None:
        self.terminated_at_s = self.clock.now_s
        self.at_s = min(self.at_s, self.clock.now_s + self.leave_s)

    def kill(self) -> None:
        self.killed, self.at_s = True, self.clock.now_s

    def wait(self, timeout: float) -> int:
        if self.at_s > self.clock.now_s + timeout:
            self.clock.now_s += timeout
            raise ranks.subprocess.TimeoutExpired("rank", timeout)
        self.clock.now_s = max(self.clock.now_s, self.at_s)
        return self.status


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ranks, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("exits", "expected"),
    [
        ([(0, 1.0), (0, 60.0)], 0),
        ([(0, 1.0), (3, 60.0)], 3),  # one is done, the other fails much later
        ([(-6, 1.0), (USER_ERROR, 2.0)], USER_ERROR),  # the one without peers dies first
        ([(USER_ERROR, 2.0), (1, 1.0)], USER_ERROR),
        ([(-9, 1.0), (USER_ERROR, 2.0)], -9),  # somebody killed it: nobody knows more
        ([(4, 2.0), (1, 1.0)], 1),  # the first to fail
        ([(1, 1.0), (USER_ERROR, 9.0)], 1),  # nobody waits that long
    ],
)
def test_the_first_failure_counts_but_a_users_mistake_goes_first(clock, exits, expected):
    assert wait_for_ranks([FakeRank(clock, status, at_s) for status, at_s in exits]) == expected


def test_all_are_told_to_leave_at_once_and_share_one_grace(clock):
    group = [FakeRank(clock, leave_s=1.0), FakeRank(clock), FakeRank(clock), FakeRank(clock, leave_s=4.0)]
    end_ranks(group)
    assert [rank.terminated_at_s for rank in group] == [0.0] * 4
    assert [rank.killed for rank in group] == [False, True, True, False]
    assert clock.now_s <= ranks.GRACE_S


def test_ranks_are_told_one_port_and_a_dead_one_stops_nobody(tmp_path):
    script = "import sys; line = sys.stdin.readline(); open(sys.argv[1], 'w').write(line)"
    group = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path / str(rank))], stdin=subprocess.PIPE)
        for rank in range(3)
    ]
    group[1].kill()
    group[1].wait(120)
    begin(group)
    assert [process.wait(120) for process in group] == [0, -signal.SIGKILL, 0]
    ports = {(tmp_path / str(rank)).read_text() for rank in (0, 2)}
    assert len(ports) == 1 and 0 < int(ports.pop()) < 65536
