"""Publisher, senders and receivers, all real; the control plane is played by the test."""

import contextlib
import os
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
    assert sender.prepare("tcp")
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


def test_versions_arrive_one_after_the_other(stage):
    publisher, receiver = stage[0](), stage[1]()
    sender = publisher.open_sender(1)
    for version in (3, 4, 9):
        publisher.publish(version, weights(version), (0.5, 0.25)).result(30)
        order, reply, answer = update(sender, receiver)
        assert (order.version, order.probe_ids, order.probe_logprobs) == (version, PROBE, (0.5, 0.25))
        assert order.initial_logprobs == (0.125, 0.0)
        assert isinstance(reply, Sent)
        assert answer == {"sum": expected_sum(version)}


def test_a_version_that_is_written_over_while_it_is_fetched_is_refused(stage):
    """As after a deadline: the learner has given the transfer up, and the generator has not noticed."""
    publisher, slow = stage[0](), stage[1]()
    sender = publisher.open_sender(1)
    publisher.publish(1, weights(1), ()).result(30)
    assert sender.prepare("tcp")
    late = next_reply(sender)
    sender.give_up()
    for version in (2, 3):
        publisher.publish(version, weights(version), ()).result(30)
    slow.obey(late)
    assert "no longer has this version" in slow.answer()["error"]
    assert update(sender, slow)[2] == {"sum": expected_sum(3)}


def process_of(sender):
    """The NCCL process behind a sender that prepares."""
    return psutil.Process(sender._nccl._worker.pid)


def prepare_nccl(sender):
    assert sender.prepare("nccl")
    return process_of(sender)


def test_without_a_gpu_nccl_says_so_and_other_transports_still_work(stage):
    publisher = stage[0]()
    sender = publisher.open_sender(2)
    publisher.publish(1, weights(1), ()).result(30)
    process = prepare_nccl(sender)
    assert isinstance(reply := next_reply(sender), Failed)
    assert "no CUDA device" in reply.reason
    assert prepare_nccl(sender) == process, "one process serves all updates"
    assert isinstance(next_reply(sender), Failed)
    assert update(sender, stage[1]())[2] == {"sum": expected_sum(1)}
    wait_until_gone(process.pid)  # it has no use for its GPU memory now


def test_a_killed_process_is_a_failed_update_and_the_next_one_has_another(stage):
    publisher = stage[0]()
    sender = publisher.open_sender(1)
    publisher.publish(1, weights(1), ()).result(30)
    first = prepare_nccl(sender)
    first.kill()
    while not isinstance(reply := next_reply(sender), Failed):
        pass
    assert "died" in reply.reason
    assert publisher._slots.newest.slot.readers == 0
    sender.give_up()  # as the hub does after every failure
    second = prepare_nccl(sender)
    assert second.pid != first.pid
    assert "no CUDA device" in next_reply(sender).reason
    second.kill()  # between two updates
    wait_until_gone(second.pid)
    assert sender.replies() == []
    assert sender.prepare("nccl")
    assert "died" in next_reply(sender).reason
    sender.give_up()
    assert update(sender, stage[1]())[2] == {"sum": expected_sum(1)}


def test_a_process_that_hangs_is_killed_when_it_is_given_up(stage):
    publisher = stage[0]()
    sender = publisher.open_sender(1)
    publisher.publish(1, weights(1), ()).result(30)
    process = prepare_nccl(sender)
    process.suspend()
    sender.transfer()  # does not wait for it
    assert sender.replies() == []
    sender.give_up()
    wait_until_gone(process.pid)
    assert publisher._slots.newest.slot.readers == 0
    assert update(sender, stage[1]())[2] == {"sum": expected_sum(1)}


def test_the_process_goes_with_the_last_sender_and_with_the_publisher(stage):
    publisher = stage[0]()
    publisher.publish(1, weights(1), ()).result(30)
    senders = [publisher.open_sender(1) for _ in range(2)]
    process = prepare_nccl(senders[0])
    assert prepare_nccl(senders[1]) == process
    assert isinstance(next_reply(senders[0]), Failed)  # so that it is not closed during an update
    senders[0].close()
    assert isinstance(next_reply(senders[1]), Failed)
    assert prepare_nccl(senders[1]) == process
    assert isinstance(next_reply(senders[1]), Failed)
    senders[1].close()
    wait_until_gone(process.pid)
    another = prepare_nccl(publisher.open_sender(1))
    publisher.close()
    wait_until_gone(another.pid)


def test_publishing_goes_on_under_a_stopped_receiver_and_no_version_is_torn(stage):
    publisher, stopped, well = stage[0](deadline_s=20.0), stage[1](), stage[1]()
    slow, fast = publisher.open_sender(1), publisher.open_sender(1)
    publisher.publish(1, weights(1), ()).result(30)
    update(slow, stopped)
    assert slow.prepare("tcp")
    order = next_reply(slow)
    stopped.signal(signal.SIGSTOP)
    stopped.obey(order)
    slow.transfer()
    for version in range(2, 8):
        publisher.publish(version, weights(version), ()).result(5)
        assert update(fast, well)[2] == {"sum": expected_sum(version)}
    stopped.signal(signal.SIGCONT)
    assert stopped.answer() == {"sum": expected_sum(1)}  # its slot was left alone all the time
    assert len(publisher._slots._slots) <= 3


def test_preparing_before_the_first_version_is_refused(stage):
    assert not stage[0]().open_sender(1).prepare("tcp")


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


def test_an_nccl_process_goes_when_the_learner_is_killed(tmp_path):
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import test_senders as t
publisher = t.SlotPublisher(t.LAYOUT, probe_ids=(1,), initial_logprobs=(), directory=Path({str(tmp_path / "w")!r}), deadline_s=5.0)
publisher.publish(1, t.weights(1), ()).result(30)
sender = publisher.open_sender(1)
sender.prepare("nccl")
print(t.process_of(sender).pid, flush=True)
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
