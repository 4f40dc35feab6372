"""Two real processes and one group between them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid

import pytest
import torch

from asyncrl.errors import TransferError
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.gloo import open_group, receive, send
from asyncrl.weights.layout import Layout, checksums

pytestmark = pytest.mark.integration

LAYOUT = Layout.plan(
    [TensorSpec(name=f"w{i}", dtype="bfloat16", shape=(97, 1 + 53 * i)) for i in range(40)], 100_000
)

RECEIVER = """
import json, sys
from asyncrl.errors import TransferError
from asyncrl.weights.gloo import open_group, receive
from asyncrl.weights.layout import Layout
import torch
order = json.load(sys.stdin)
layout = Layout.from_plain(order["layout"])
try:
    group = open_group(order["rendezvous"], rank=1, deadline_s=order["deadline_s"])
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    for rounds in range(order["rounds"]):
        buffer.zero_()
        receive(group, buffer, layout, order["checksums"])
        print("done", buffer.sum(dtype=torch.int64).item(), flush=True)
except TransferError as error:
    print("failed", error, flush=True)
group = None  # joins Gloo's threads: one that still frees a tensor when Python ends would terminate the process
"""


def random_buffer(seed=0):
    return torch.randint(
        0, 256, (LAYOUT.total_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


class Receiver:
    def __init__(self, rendezvous, sums, *, deadline_s=20.0, rounds=1):

        self.process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        order = {
            "rendezvous": rendezvous,
            "layout": LAYOUT.to_plain(),
            "checksums": sums,
            "deadline_s": deadline_s,
            "rounds": rounds,
        }
        json.dump(order, self.process.stdin)
        self.process.stdin.close()

    def line(self):
        return self.process.stdout.readline().strip()

    def close(self):
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture
def receivers():
    made = []

    def make(*args, **kwargs):
        made.append(Receiver(*args, **kwargs))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


@pytest.fixture
def by_file(tmp_path):
    return {"name": uuid.uuid4().hex, "directory": str(tmp_path)}


def test_what_arrives_is_what_was_sent_again_and_again_in_one_group(receivers, by_file):
    buffer = random_buffer()
    receiver = receivers(by_file, checksums(buffer, LAYOUT), rounds=3)
    group = open_group(by_file, rank=0, deadline_s=20.0)
    for _ in range(3):
        send(group, buffer, LAYOUT)
        assert receiver.line() == f"done {buffer.sum(dtype=torch.int64)}"


def test_a_served_store_listens_on_the_given_interface_only(receivers):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        rendezvous = {"name": "served", "host": "127.0.0.1", "port": port}
        buffer = random_buffer()
        receiver = receivers(rendezvous, checksums(buffer, LAYOUT))
        group = open_group(rendezvous, rank=0, deadline_s=20.0, listener=listener)
        listening = _listening_addresses()
        assert f"0100007F:{port:04X}" in listening
        assert f"00000000:{port:04X}" not in listening
        send(group, buffer, LAYOUT)
        assert receiver.line() == f"done {buffer.sum(dtype=torch.int64)}"


@pytest.mark.parametrize("index", [1, len(LAYOUT.specs) // 2, len(LAYOUT.specs) - 1])
def test_a_flipped_bit_in_any_bucket_is_named_and_refused(receivers, by_file, index):
    buffer = random_buffer()
    sums = checksums(buffer, LAYOUT)
    LAYOUT.view(buffer, index).view(-1).view(torch.uint8)[5] ^= 4
    receiver = receivers(by_file, sums)
    group = open_group(by_file, rank=0, deadline_s=20.0)
    with contextlib.suppress(TransferError):  # the receiver hangs up before all has left
        send(group, buffer, LAYOUT)
    line = receiver.line()
    assert line.startswith("failed")
    assert f"'w{index}'" in line
    assert receiver.process.wait(10) == 0


def test_nobody_comes(by_file):
    started_s = time.monotonic()
    with pytest.raises(TransferError, match="not opened within 1 s"):
        open_group(by_file, rank=0, deadline_s=1.0)
    assert time.monotonic() - started_s < 10


def test_a_killed_receiver_ends_the_transfer_and_spoils_the_group(receivers, by_file):
    buffer = random_buffer()
    receiver = receivers(by_file, checksums(buffer, LAYOUT), rounds=100_000)
    group = open_group(by_file, rank=0, deadline_s=20.0)
    send(group, buffer, LAYOUT)
    receiver.line()
    receiver.process.kill()
    started_s = time.monotonic()
    with pytest.raises(TransferError, match="transfer failed"):
        for _ in range(1000):
            send(group, buffer, LAYOUT)
    assert time.monotonic() - started_s < 15
    with pytest.raises(TransferError, match="earlier transfer failed"):
        send(group, buffer, LAYOUT)


def test_a_stopped_receiver_ends_the_transfer_at_the_deadline(receivers, by_file):
    buffer = random_buffer()
    receiver = receivers(by_file, checksums(buffer, LAYOUT), rounds=100_000)
    group = open_group(by_file, rank=0, deadline_s=20.0)
    group.deadline_s = 1.5
    send(group, buffer, LAYOUT)
    receiver.line()
    receiver.process.send_signal(signal.SIGSTOP)
    started_s = time.monotonic()
    with pytest.raises(TransferError, match="transfer failed"):
        for _ in range(1000):
            send(group, buffer, LAYOUT)
    assert time.monotonic() - started_s < 15


def test_a_receiver_that_refused_a_bucket_cannot_reuse_the_group(by_file):
    pid = os.fork()
    if pid == 0:  # the sender; leaves without cleaning up, as a killed one would
        try:
            send(open_group(by_file, rank=0, deadline_s=10.0), random_buffer(), LAYOUT)
            time.sleep(5)
        finally:
            os._exit(0)
    try:
        group = open_group(by_file, rank=1, deadline_s=10.0)
        buffer, others = (
            torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8),
            checksums(random_buffer(1), LAYOUT),
        )
        with pytest.raises(TransferError, match="checksum"):
            receive(group, buffer, LAYOUT, others)
        with pytest.raises(TransferError, match="earlier transfer failed"):
            receive(group, buffer, LAYOUT, others)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _listening_addresses():
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A"}
