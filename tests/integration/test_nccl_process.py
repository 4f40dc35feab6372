"""One NCCL process for several generators: real processes and channels; sockets stand for NCCL's groups."""

import base64
import socket
from pathlib import Path

import psutil
import pytest
import torch

from asyncrl.weights import sender as senders
from asyncrl.weights.base import Failed, Sent, TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout
from asyncrl.weights.publisher import SlotPublisher
from asyncrl.workers import Worker
from tests.support.nccl_stand_in import SIZE, name_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

LAYOUT = Layout.plan(
    [TensorSpec(name=f"w{i}", dtype="float32", shape=(64, 1 + 3 * i)) for i in range(9)], 10_000
)


def weights(version):
    generator = torch.Generator().manual_seed(version)
    return [(spec.name, torch.randn(spec.shape, generator=generator)) for spec in LAYOUT.specs]


def bytes_of(version):
    return b"".join(tensor.numpy().tobytes() for _, tensor in weights(version))


class Generator:
    """The hub's and the generator's part of one generator's updates."""

    def __init__(self, publisher):
        self.sender, self.group, self.init = publisher.open_sender(1), None, None

    def reply(self):
        replies = []

        def heard():
            replies.extend(self.sender.replies())
            return replies

        wait_until(heard)
        return replies.pop()

    def prepare(self):
        assert self.sender.prepare("nccl")
        order = self.reply()
        assert isinstance(order, UpdateOrder), order
        self.init = order.details["init"] or self.init
        self.is_new = order.details["init"] is not None
        return order

    def start(self):
        self.prepare()
        self.sender.transfer()

    def receive(self):
        """Enter the group and return all bytes of the version."""
        if self.is_new:
            unique_id = base64.b64decode(self.init["nccl_unique_id_b64"])
            self.group = socket.socket(socket.AF_UNIX)
            wait_until(lambda: self.group.connect_ex(name_of(unique_id)) == 0)
            self.group.settimeout(120.0)
        arrived = b""
        while len(arrived) < len(bytes_of(1)):
            (size,) = SIZE.unpack(self.group.recv(SIZE.size, socket.MSG_WAITALL))
            arrived += self.group.recv(size, socket.MSG_WAITALL)
        return arrived

    def update(self):
        self.start()
        arrived = self.receive()
        assert isinstance(self.reply(), Sent)
        return arrived


@pytest.fixture
def publisher(tmp_path, monkeypatch):
    monkeypatch.setattr(senders, "Worker", lambda module: Worker("tests.support.nccl_stand_in"))
    publisher = SlotPublisher(
        LAYOUT, probe_ids=(1,), initial_logprobs=(), directory=tmp_path / "weights", deadline_s=120.0
    )
    publisher.publish(1, weights(1), ()).result(30)
    yield publisher
    publisher.close()


def process_of(publisher):
    return psutil.Process(publisher._nccl._worker.pid)


def has_ended(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_generators_share_a_process_and_what_it_has_mapped(publisher):
    pair = [Generator(publisher) for _ in range(2)]
    for version in (1, 2, 3):
        if version > 1:
            publisher.publish(version, weights(version), ()).result(30)
        for each in pair:
            each.start()
        process = process_of(publisher)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert maps.count("memfd:asyncrl-weights") == 1
        # Each is served while the other one has not come yet; in turn, so that no order is fixed.
        for each in pair if version % 2 else reversed(pair):
            assert each.receive() == bytes_of(version)
            assert isinstance(each.reply(), Sent)
        assert [each.is_new for each in pair] == [version == 1] * 2
    assert process_of(publisher) == process
    assert publisher.pinned == 0


def test_a_hang_ends_the_process_after_the_updates_under_way_and_all_get_the_next_version(publisher):
    hung, slow, ready = (Generator(publisher) for _ in range(3))
    assert ready.update() == bytes_of(1)
    hung.start()
    slow.start()
    prepared = Generator(publisher)
    prepared.prepare()
    process = process_of(publisher)
    hung.sender.give_up()
    for each in (hung, ready):
        assert not each.sender.prepare("nccl")  # the hub asks again with its next tick
    assert slow.receive() == bytes_of(1)
    assert isinstance(slow.reply(), Sent)
    assert process.is_running()
    prepared.sender.transfer()
    assert prepared.receive() == bytes_of(1)
    assert isinstance(prepared.reply(), Sent)
    wait_until(lambda: has_ended(process))
    publisher.publish(2, weights(2), ()).result(30)
    for each in (hung, slow, ready, prepared):
        assert each.update() == bytes_of(2)
        assert each.is_new
    assert process_of(publisher) != process
    assert publisher.pinned == 0


def test_a_process_that_dies_fails_what_is_under_way_and_all_get_the_next_version(publisher):
    pair = [Generator(publisher) for _ in range(2)]
    for each in pair:
        each.update()
    pair[0].prepare()
    process = process_of(publisher)
    process.suspend()  # so that the transfer cannot be over before the kill
    pair[0].sender.transfer()
    process.kill()
    assert "died" in pair[0].reply().reason
    pair[0].sender.give_up()  # as the hub does after every failure
    publisher.publish(2, weights(2), ()).result(30)
    for each in pair:
        assert each.update() == bytes_of(2)
        assert each.is_new
    between = process_of(publisher)
    between.kill()
    wait_until(lambda: has_ended(between))
    late = Generator(publisher)
    assert late.sender.prepare("nccl")
    assert isinstance(late.reply(), Failed)
    assert [each.update() for each in (*pair, late)] == [bytes_of(2)] * 3


def test_a_generator_that_fails_or_leaves_between_updates_costs_only_its_own_group(publisher):
    staying, leaving, failing = (Generator(publisher) for _ in range(3))
    for each in (staying, leaving, failing):
        each.update()
    process = process_of(publisher)
    leaving.sender.close()
    failing.sender.give_up()  # its report said, for example, that a checksum differs
    for group in (leaving.group, failing.group):
        assert group.recv(1) == b""  # their communicators are freed
    assert failing.update() == staying.update() == bytes_of(1)
    assert failing.is_new
    assert not staying.is_new
    assert process_of(publisher) == process


def test_an_answer_to_an_update_that_was_given_up_is_not_taken_for_the_next_ones(publisher):
    other, generator = Generator(publisher), Generator(publisher)
    other.start()
    generator.start()
    generator.sender.give_up()
    other.sender.give_up()
    assert generator.update() == other.update() == bytes_of(1)  # the same version
    assert generator.sender.replies() == other.sender.replies() == []
