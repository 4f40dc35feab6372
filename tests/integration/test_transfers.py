"""Publisher and receivers over TCP, all real; the control plane is played by the test."""

import os
import signal
from dataclasses import asdict

import pytest
import torch

from asyncrl.errors import TransferError
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout
from asyncrl.weights.publisher import SlotPublisher
from tests.support import receiver_stand_in
from tests.support.forks import fork_server
from tests.support.waiting import LONG_S, stop

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


def update(publisher, reader, receiver):
    """One whole update: the order, and what the receiver answers."""
    order = publisher.order(reader, "tcp")
    receiver.obey(order)
    return order, receiver.answer()


@pytest.fixture(scope="module")
def forks():
    with fork_server("tests.support.receiver_stand_in") as forks:
        yield forks


@pytest.fixture
def stage(tmp_path, forks):
    publishers, receivers = [], []

    def publisher(**kwargs):
        options = {
            "probe_ids": (PROBE,),
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
    for version in (3, 4, 9):
        publisher.publish(version, weights(version), (0.5, 0.25)).result(LONG_S)
        order, answer = update(publisher, "a", receiver)
        assert (order.version, order.probe_ids, order.probe_logprobs) == (version, (PROBE,), (0.5, 0.25))
        assert order.initial_logprobs == (0.125, 0.0)
        assert answer == {"sum": expected_sum(version)}


def test_a_version_that_is_written_over_while_it_is_fetched_is_refused(stage):
    """As after a deadline: the learner has given the transfer up, and the generator has not noticed."""
    publisher, slow = stage[0](), stage[1]()
    publisher.publish(1, weights(1), ()).result(LONG_S)
    late = publisher.order("a", "tcp")
    publisher.release("a")
    for version in (2, 3):
        publisher.publish(version, weights(version), ()).result(LONG_S)
    slow.obey(late)
    assert "no longer has this version" in slow.answer()["error"]
    assert update(publisher, "a", slow)[1] == {"sum": expected_sum(3)}


def test_publishing_goes_on_under_a_stopped_receiver_and_no_version_is_torn(stage):
    publisher, stopped, well = stage[0](deadline_s=20.0), stage[1](), stage[1]()
    publisher.publish(1, weights(1), ()).result(LONG_S)
    update(publisher, "slow", stopped)
    order = publisher.order("slow", "tcp")
    stop(stopped.process.pid)
    stopped.obey(order)
    for version in range(2, 8):
        publisher.publish(version, weights(version), ()).result(LONG_S)
        assert update(publisher, "fast", well)[1] == {"sum": expected_sum(version)}
    stopped.signal(signal.SIGCONT)
    assert stopped.answer() == {"sum": expected_sum(1)}  # its slot was left alone all the time
    assert len(publisher._slots._slots) <= 3


def test_there_is_no_order_before_the_first_version(stage):
    assert stage[0]().order("a", "tcp") is None


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
