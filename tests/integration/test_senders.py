"""Publisher, sender processes and receivers, all real; the control plane is played by the test."""

import contextlib
import errno
import os
import resource
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch

from asyncrl.errors import TransferError
from asyncrl.weights.base import Failed, Sent, TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout
from asyncrl.weights.publisher import SlotPublisher
from tests.support import receiver_stand_in
from tests.support.forks import fork_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

LAYOUT = Layout.plan(
    [TensorSpec(name=f"w{i}", dtype="bfloat16", shape=(97, 1 + 5 * i)) for i in range(20)], 20_000
)
PROBE = (1, 2, 3)


def weights(version):
    generator = torch.Generator().manual_seed(version)
    return [
        (spec.name, torch.randn(spec.shape, generator=generator).to(torch.bfloat16)) for spec in LAYOUT.specs
    ]


def expected_sum(version):
    return sum(
        int(tensor.reshape(-1).view(torch.uint8).sum(dtype=torch.int64)) for _, tensor in weights(version)
    )


class Receiver:
    def __init__(self, forks):
        self.channel, theirs = forks.Pipe()
        with theirs:
            self.process = forks.Process(target=receiver_stand_in.work, args=(theirs,))
            self.process.start()

    def obey(self, order):
        self.channel.send(asdict(order))

    def answer(self):
        assert self.channel.poll(120.0), "no answer"
        return self.channel.recv()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def close(self):
        self.process.kill()
        self.process.join()
        self.channel.close()


def next_reply(sender, timeout_s=120.0):
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        select.select([sender], [], [], 0.5)
        if replies := sender.replies():
            return replies[0]
    raise AssertionError("no reply")


def update(sender, receiver):
    """One whole update; what the receiver answers."""
    assert sender.prepare("gloo")
    order = next_reply(sender)
    assert isinstance(order, UpdateOrder), order
    receiver.obey(order)
    sender.transfer()
    reply = next_reply(sender)
    return order, reply, receiver.answer()


@pytest.fixture(scope="module")
def forks():
    with fork_server("tests.support.receiver_stand_in") as forks:
        yield forks


@pytest.fixture
def stage(tmp_path, forks):
    publishers, receivers = [], []

    def publisher(**kwargs):
        options = {
            "probe_ids": PROBE,
            "initial_logprobs": (0.125, 0.0),
            "directory": tmp_path / "weights",
            "deadline_s": 20.0,
            "interface": "127.0.0.1",
            **kwargs,
        }
        publishers.append(SlotPublisher(LAYOUT, **options))
        return publishers[-1]

    def receiver():
        receivers.append(Receiver(forks))
        return receivers[-1]

    yield publisher, receiver
    for made in receivers:
        made.close()
    for made in publishers:
        made.close()


@pytest.mark.parametrize("options", [{"interface": None}, {}])
def test_versions_arrive_one_after_the_other_through_one_group(stage, options):
    publisher, receiver = stage[0](**options), stage[1]()
    sender = publisher.open_sender(1)
    names = set()
    for version in (3, 4, 9):
        publisher.publish(version, weights(version), (0.5, 0.25)).result(30)
        order, reply, answer = update(sender, receiver)
        assert (order.version, order.probe_ids, order.probe_logprobs) == (version, PROBE, (0.5, 0.25))
        assert order.initial_logprobs == (0.125, 0.0)
        assert isinstance(reply, Sent)
        assert answer == {"sum": expected_sum(version)}
        names.add(order.details["rendezvous"]["name"])
    assert len(names) == 1


def pid_of(sender):
    """Of the process behind a sender, as soon as it is known; answers until then are dropped."""
    while sender._process is None:
        select.select([sender], [], [], 30.0)
        sender.replies()
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/self/fdinfo/{sender._process}").read_text().splitlines()
    )
    return int(fields["Pid"])


def test_after_a_dead_receiver_a_restarted_sender_serves_the_next_one_in_a_new_group(stage):
    publisher, receiver = stage[0](deadline_s=5.0), stage[1]()
    sender = publisher.open_sender(1)
    publisher.publish(1, weights(1), ()).result(30)
    first, _, _ = update(sender, receiver)
    receiver.process.kill()
    receiver.process.join()
    assert sender.prepare("gloo")
    assert isinstance(next_reply(sender), UpdateOrder)
    sender.transfer()
    reply = next_reply(sender)
    assert isinstance(reply, Failed)
    old_pid = pid_of(sender)
    sender.restart()
    wait_until_gone(old_pid)
    second, reply, answer = update(sender, stage[1]())
    assert isinstance(reply, Sent)
    assert answer == {"sum": expected_sum(1)}
    assert first.details["rendezvous"]["name"] != second.details["rendezvous"]["name"]


def test_a_killed_sender_is_reported_and_can_be_restarted(stage):
    publisher = stage[0]()
    sender = publisher.open_sender(1)
    publisher.publish(1, weights(1), ()).result(30)
    assert sender.prepare("gloo")
    os.kill(pid_of(sender), signal.SIGKILL)
    while not isinstance(reply := next_reply(sender), Failed):
        pass
    assert "died" in reply.reason
    sender.restart()
    assert update(sender, stage[1]())[2] == {"sum": expected_sum(1)}


def test_the_fork_server_s_death_is_the_senders_and_all_of_them_come_back(stage):
    publisher = stage[0]()
    senders = [publisher.open_sender(1) for _ in range(2)]
    publisher.publish(1, weights(1), ()).result(30)
    pids = [pid_of(sender) for sender in senders]
    (parent,) = {psutil.Process(pid).ppid() for pid in pids}
    os.kill(parent, signal.SIGKILL)
    for sender in senders:
        assert isinstance(next_reply(sender), Failed)
    wait_until_gone(*pids)
    for sender in senders:
        sender.restart()
        assert update(sender, stage[1]())[2] == {"sum": expected_sum(1)}


def test_a_fork_server_that_hangs_is_replaced_once_for_all_its_senders(stage):
    publisher = stage[0]()
    forks = publisher._fork_server
    os.kill(forks.pid, signal.SIGSTOP)
    senders = [publisher.open_sender(1) for _ in range(2)]
    publisher.publish(1, weights(1), (0.0, 0.0)).result(30)
    assert all(sender.prepare("gloo") for sender in senders)
    hung = forks.pid
    for sender in senders:  # as the schedule has it when they are late
        sender.restart()
    assert forks.pid != hung and forks.generation == 2
    for sender in senders:
        assert update(sender, stage[1]())[2] == {"sum": expected_sum(1)}


def refuse(*args, **kwargs):
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_a_sender_that_cannot_be_started_is_started_later(stage, monkeypatch, tmp_path):
    publisher = stage[0]()
    publisher.publish(1, weights(1), ()).result(30)
    sender, other = publisher.open_sender(1), publisher.open_sender(1)
    untouched = pid_of(other)
    for target in ("pathlib.Path.mkdir", "socket.socketpair"):
        with monkeypatch.context() as patch:
            patch.setattr(target, refuse)
            for _ in range(3):
                with pytest.raises(OSError, match="temporarily unavailable"):
                    sender.restart()
        sender.restart()
        assert update(sender, stage[1]())[2] == {"sum": expected_sum(1)}
    assert pid_of(other) == untouched and publisher._fork_server.generation == 1
    assert len(list((tmp_path / "weights" / "rendezvous").iterdir())) == 2, (
        "nothing is left of starts that failed"
    )
    sender.close()


def test_a_fork_server_that_cannot_be_started_is_started_later(stage, monkeypatch):
    publisher = stage[0]()
    publisher.publish(1, weights(1), ()).result(30)
    sender, closed = publisher.open_sender(1), publisher.open_sender(1)
    os.kill(publisher._fork_server.pid, signal.SIGKILL)
    assert isinstance(next_reply(sender), Failed)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        for each in (sender, closed, sender):
            with pytest.raises(OSError, match="temporarily unavailable"):
                each.restart()
    closed.close()
    sender.restart()
    assert update(sender, stage[1]())[2] == {"sum": expected_sum(1)}


def test_a_fork_server_that_cannot_fork_lives_and_its_senders_too(stage):
    publisher = stage[0]()
    publisher.publish(1, weights(1), ()).result(30)
    alive = publisher.open_sender(1)
    pid = pid_of(alive)
    server = publisher._fork_server.pid
    before = resource.prlimit(server, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{server}/fd")}
    first_free = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (first_free, before[1]))
    failed = publisher.open_sender(1)
    assert isinstance(next_reply(failed), Failed)
    resource.prlimit(server, resource.RLIMIT_NOFILE, before)
    failed.restart()
    assert update(failed, stage[1]())[2] == {"sum": expected_sum(1)}
    assert update(alive, stage[1]())[2] == {"sum": expected_sum(1)}
    assert pid_of(alive) == pid and publisher._fork_server.pid == server


def test_a_sender_that_is_closed_while_it_is_being_forked_leaves_no_process(stage):
    publisher = stage[0]()
    publisher.publish(1, weights(1), ()).result(30)
    closed = [publisher.open_sender(1) for _ in range(3)]
    for sender in closed:
        assert sender.prepare("gloo")
        sender.close()  # the fork server has not even finished its imports
    alive = publisher.open_sender(1)
    forked = psutil.Process(psutil.Process(pid_of(alive)).ppid())
    wait_until(lambda: [child.pid for child in forked.children()] == [pid_of(alive)], seen=forked.children)


def test_publishing_goes_on_under_a_stopped_receiver_and_no_version_is_torn(stage):
    publisher, stopped, well = stage[0](deadline_s=20.0), stage[1](), stage[1]()
    slow, fast = publisher.open_sender(1), publisher.open_sender(1)
    publisher.publish(1, weights(1), ()).result(30)
    update(slow, stopped)
    assert slow.prepare("gloo")
    order = next_reply(slow)
    stopped.signal(signal.SIGSTOP)
    stopped.obey(order)
    slow.transfer()
    for version in range(2, 8):
        publisher.publish(version, weights(version), ()).result(5)
        assert update(fast, well)[2] == {"sum": expected_sum(version)}
    stopped.signal(signal.SIGCONT)
    assert stopped.answer() == {"sum": expected_sum(1)}  # its slot was left alone all the time
    assert len(publisher._slots) <= 3


def test_preparing_before_the_first_version_is_refused(stage):
    assert not stage[0]().open_sender(1).prepare("gloo")


def test_tensors_that_are_not_the_layouts_are_refused(stage):
    publisher = stage[0]()
    good = weights(1)
    for bad, message in [
        (good[1:], "missing"),
        ([*good, good[0]], "repeated"),
        ([("other", good[0][1]), *good[1:]], "unknown"),
        ([(good[0][0], good[0][1][:1]), *good[1:]], "another shape"),
    ]:
        with pytest.raises(TransferError, match=message):
            publisher.publish(1, bad, ())


def test_senders_and_memory_go_when_the_learner_is_killed(tmp_path):
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import test_senders as t
publisher = t.SlotPublisher(t.LAYOUT, probe_ids=(1,), initial_logprobs=(), directory=Path({str(tmp_path / "w")!r}), deadline_s=5.0,
                           interface="127.0.0.1")
publisher.publish(1, t.weights(1), ()).result(30)
sender = publisher.open_sender(1)
sender.prepare("gloo")
t.next_reply(sender)
print(t.pid_of(sender), flush=True)
time.sleep(60)
"""
    learner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(learner.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
    finally:
        learner.kill()
        learner.wait(10)
        learner.stdout.close()
    wait_until_gone(pid)


def wait_until_gone(*pids):
    """Its sockets are closed a moment before a process that dies is counted as gone."""
    wait_until(lambda: not any(map(_is_running, pids)))


def _is_running(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
