"""Ranks end together, and the status of the one that knows the cause is the one that counts."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from asyncrl.config.schema import Config
from asyncrl.hosting import processes, rank_group
from asyncrl.hosting.processes import stop_processes
from asyncrl.hosting.rank_group import GRACE_S, begin, free_port, leave, start_ranks, wait_for_ranks
from asyncrl.hosting.supervisor import USER_ERROR
from asyncrl.launch import ranks
from asyncrl.launch.ranks import OnlyHost, run_ranks


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

    # As a Popen, it sends no signal to a process that has ended.
    def terminate(self) -> None:
        if self.poll() is None:
            self.terminated_at_s = self.clock.now_s
            self.at_s = min(self.at_s, self.clock.now_s + self.leave_s)

    def kill(self) -> None:
        if self.poll() is None:
            self.killed, self.at_s = True, self.clock.now_s

    def wait(self, timeout: float) -> int:
        if self.at_s > self.clock.now_s + timeout:
            self.clock.now_s += timeout
            raise rank_group.subprocess.TimeoutExpired("rank", timeout)
        self.clock.now_s = max(self.clock.now_s, self.at_s)
        return self.status


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (rank_group, processes):
        monkeypatch.setattr(module, "time", clock)
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
    stop_processes(group, grace_s=GRACE_S)
    assert [rank.terminated_at_s for rank in group] == [0.0] * 4
    assert [rank.killed for rank in group] == [False, True, True, False]
    assert clock.now_s <= GRACE_S


def test_ranks_that_are_asked_to_leave_get_the_time_that_they_need_to_save(clock):
    """As `launch.ranks` does on SIGTERM: the limit is that of the supervisor."""
    group = [FakeRank(clock, 143, leave_s=300.0), FakeRank(clock, 143, leave_s=301.0)]
    leave(group)
    stop_processes(group, grace_s=GRACE_S)
    assert [rank.terminated_at_s for rank in group] == [0.0] * 2 and not any(rank.killed for rank in group)
    one_dies = [FakeRank(clock, -9, at_s=clock.now_s + 5.0, leave_s=5.0), FakeRank(clock)]
    began_s = clock.now_s
    leave(one_dies)
    stop_processes(one_dies, grace_s=GRACE_S)
    assert one_dies[1].killed, "without the other it can save nothing"
    assert clock.now_s - began_s < 5.1 + GRACE_S


def test_a_rank_that_a_signal_ends_gives_the_status_that_shells_give(tmp_path):
    """Its parent exits with it: 247, which is -9, would tell nobody of SIGKILL."""
    assert (
        run_ranks(["sh", "-c", "kill -9 $$"], 2, lambda: OnlyHost(tmp_path / "lock")) == 128 + signal.SIGKILL
    )


@pytest.mark.parametrize(
    ("bind", "hosts", "words", "address"),
    [
        ("tcp://192.168.1.5:7000", 2, [], "192.168.1.5"),
        ("tcp://192.168.1.5:7000", 2, ["--host", "1", "--learner", "10.2.0.5"], "192.168.1.5"),
        ("auto", 2, ["--host", "1", "--learner", "10.2.0.5"], "10.2.0.5"),
        (None, 2, ["--host", "1", "--learner", "fd00::5"], "fd00::5"),
        (None, 1, [], "127.0.0.1"),
    ],
)
def test_the_ranks_of_all_hosts_meet_where_rank_0_listens(monkeypatch, bind, hosts, words, address):
    """Which `control.bind` says, if the cluster knows host 0 by the address of another network."""
    values = {
        "run": {"name": "far"},
        "model": {"path": "none"},
        "data": {"train": "none.jsonl"},
        "reward": {"functions": [{"function": "exact_match"}]},
        "learner": {"ranks": 2},
        "generator": {"count": 1},
        "cluster": {"kind": "local", "learner_hosts": hosts},
        "control": {"bind": bind},
    }
    told = []

    def run_ranks(*_, address, **__):
        told.append(address)
        return 0

    monkeypatch.setattr(sys, "argv", ["ranks", "--store", "redis://s", "--config", "f", *words])
    monkeypatch.setenv("ASYNCRL_SECRET", "00" * 32)
    monkeypatch.setattr(ranks, "load_config", lambda path: Config.model_validate(values))
    monkeypatch.setattr(ranks, "setup_logging", lambda *_, **__: None)
    monkeypatch.setattr(ranks, "run_role", lambda role: role())
    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    with pytest.raises(SystemExit):
        ranks.main()
    assert told == [address]


RANK = """
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
print(*(os.environ[name] for name in names), sys.stdin.readline().strip(), file=open(sys.argv[1] + os.environ["RANK"], "w"))
"""


def test_the_ranks_of_a_host_are_told_where_all_meet_and_a_dead_one_stops_nobody(tmp_path):
    """Ranks 4 to 6 of 8, whose rank 0 is on another host."""
    command = [sys.executable, "-c", RANK, f"{tmp_path}/"]
    group = start_ranks(command, range(4, 7), ranks=8, address="10.0.0.1", environment=os.environ)
    group[1].kill()
    group[1].wait(120)
    begin(group, 29500)
    assert wait_for_ranks(group) == -signal.SIGKILL
    assert [process.wait(120) for process in group] == [0, -signal.SIGKILL, 0]
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told == {"4": "4 0 8 10.0.0.1 29500\n", "6": "6 2 8 10.0.0.1 29500\n"}


def test_a_port_is_free_until_it_is_used():
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))) as server:
        assert server.getsockname()[1] != free_port("127.0.0.1")


ORPHAN = "import sys; sys.stdin.read(); from asyncrl.launch.roles import run_role; run_role(lambda: open(sys.argv[1], 'w').close())"
PARENT = """
import os, sys
from asyncrl.hosting.rank_group import start_ranks
(rank,) = start_ranks(sys.argv[1:], range(1), ranks=1, address="127.0.0.1", environment=os.environ)
print(rank.pid, flush=True)
os._exit(0)
"""


def test_a_rank_that_lost_its_parent_before_it_begins_does_not_begin(tmp_path):
    """It would wait for the other ranks, which are not started, and hold its GPU."""
    command = [sys.executable, "-c", ORPHAN, str(tmp_path / "begun")]
    done = subprocess.run(
        [sys.executable, "-c", PARENT, *command], capture_output=True, text=True, timeout=120, check=True
    )
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(120)
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_the_rendezvous_has_a_port_at_every_address(address):
    assert 0 < free_port(address) < 65536
