"""A learner that serves random publications over TCP, and a relay of a generator as a process of its own."""

import contextlib
import os
import time
from pathlib import Path
from unittest import mock

import torch

from asyncrl.errors import TransferError
from asyncrl.hosting.processes import die_with_parent
from asyncrl.weights import staging
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout, checksums, verify
from asyncrl.weights.slots import Slot, open_slot
from asyncrl.weights.stream import SlotServer
from tests.support.waiting import let_pass

LAYOUT = Layout.plan(
    [TensorSpec(name=f"w{i}", dtype="bfloat16", shape=(97, 1 + 53 * i)) for i in range(40)], 100_000
)
# More than fits into the buffers of a connection.
LARGE = Layout.plan([TensorSpec(name=f"w{i}", dtype="float32", shape=(1 << 20,)) for i in range(16)], 4 << 20)
WAIT_S = 20.0


def filled(layout, stamp):
    """A slot of random bytes with this publication."""
    slot = Slot.create(layout.total_bytes)
    generator = torch.Generator().manual_seed(stamp)
    slot.buffer.copy_(torch.randint(0, 256, (layout.total_bytes,), dtype=torch.uint8, generator=generator))
    slot.complete(stamp)
    return slot


def pinned(publisher):
    """How many versions readers have pinned."""
    with publisher._lock:
        return sum(slot.readers for place in set(publisher._places.values()) for slot in place._slots)


class Learner:
    """Publications 1, 2, ... of random bytes, and how often each was fetched."""

    def __init__(self, layout=LAYOUT, versions=3):
        self.layout, self.asked = layout, []
        self.slots = {stamp: filled(layout, stamp) for stamp in range(1, versions + 1)}
        self.sums = {stamp: checksums(slot.buffer, layout) for stamp, slot in self.slots.items()}
        self.server = SlotServer("127.0.0.1", self._find, layout.total_bytes, deadline_s=WAIT_S)

    def _find(self, stamp):
        self.asked.append(stamp)
        return self.slots[stamp].file if stamp in self.slots else -1

    def bring(self, relay, stamp, wait_s=WAIT_S):
        """What a generator's engine would find."""
        until_s = time.monotonic() + wait_s
        described = relay.bring(
            "tcp", self.server.source(stamp), self.layout, self.sums[stamp], until_s=until_s
        )
        return open_slot(described, self.layout.total_bytes)

    def holds(self, slot, stamp):
        slot.require_unchanged()
        return torch.equal(slot.buffer, self.slots[stamp].buffer)

    def close(self):
        self.server.close()
        for slot in self.slots.values():
            slot.close()


def work(directory, channel):
    """As a process: bring what each order of the channel names, and answer with the sum of its bytes."""
    die_with_parent(os.getppid())
    sharing = staging.Relay(Path(directory))
    with contextlib.suppress(EOFError):
        while True:
            order = channel.recv()

            def slowly(*arguments, stall_s=order["stall_s"]):
                verify(*arguments)
                if stall_s:
                    channel.send("fetching")
                    let_pass(stall_s)

            staging.SILENT_S = order["silent_s"]
            mock.patch("asyncrl.weights.stream.verify", slowly).start()
            layout, until_s = Layout.from_plain(order["layout"]), time.monotonic() + order["wait_s"]
            try:
                described = sharing.bring("tcp", order["source"], layout, order["sums"], until_s=until_s)
                slot = open_slot(described, layout.total_bytes)
                answer: int | str = int(slot.buffer.sum())
                slot.require_unchanged()
            except TransferError as error:
                answer = str(error)
            channel.send(answer)
