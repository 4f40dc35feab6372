"""A generator's receiving end without a generator."""

import contextlib
import functools
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import psutil
import torch

from asyncrl.errors import TransferError
from asyncrl.hosting.processes import die_with_parent
from asyncrl.weights import layout, stream
from asyncrl.weights import staging as arrival
from asyncrl.weights.base import UpdateOrder
from asyncrl.weights.slots import open_slot
from asyncrl.weights.staging import HostStaging

HOSTS = Path(tempfile.gettempdir(), f"asyncrl-hosts-{os.getuid()}")


@functools.cache
def staging(pid):
    """The staging of this process, which is a host of its own: it fetches every version itself.

    Processes that are killed leave the memory of their host, which the next one removes.
    """
    HOSTS.mkdir(exist_ok=True)
    for left in HOSTS.iterdir():
        if not psutil.pid_exists(int(left.name)):
            shutil.rmtree(left, ignore_errors=True)
    memory = HOSTS / str(pid)
    memory.mkdir(exist_ok=True)
    with mock.patch.object(arrival, "_MEMORY", memory):
        return HostStaging(Path("/"))


def receive(order, on_tensor=lambda: None):
    """Sum of all bytes received, or TransferError. `on_tensor` is called before a tensor is verified."""

    def verify(*args):
        on_tensor()
        layout.verify(*args)

    with mock.patch.object(stream, "verify", verify), mock.patch.object(arrival, "verify", verify):
        order = staging(os.getpid()).stage(order)
    plan = layout.Layout.from_plain(order.details["layout"])
    slot = open_slot(order.details["slot"], plan.total_bytes)
    tensors = [plan.view(slot.buffer, index).clone() for index in range(len(plan.specs))]
    slot.require_unchanged()
    return sum(map(byte_sum, tensors))


def byte_sum(tensor):
    return int(tensor.reshape(-1).view(torch.uint8).sum(dtype=torch.int64))


def work(channel):
    """As a process of its own: receive what each order of the channel announces, and answer."""
    die_with_parent(os.getppid())
    with contextlib.suppress(EOFError):
        while True:
            order = UpdateOrder(**channel.recv())
            try:
                answer = {"sum": receive(order)}
            except TransferError as error:
                answer = {"error": str(error)}
            channel.send(answer)
    staging(os.getpid()).close()
