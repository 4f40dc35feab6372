"""A plugin of vLLM for its workers on CPUs: sockets in place of NCCL, see tests/support/nccl_stand_in.py."""

import contextlib
import os
import socket
import time
from types import SimpleNamespace

from asyncrl.engine.base import OWNER_ENV
from tests.support.nccl_stand_in import SIZE, name_of

MEET_S = 60.0


class Communicator:
    """A rank that receives."""

    def __init__(self, unique_id, rank, world_size, device):
        self.available, self.disabled = True, False
        self._sender = socket.socket(socket.AF_UNIX)
        until_s = time.monotonic() + MEET_S
        while self._sender.connect_ex(name_of(unique_id)) and time.monotonic() < until_s:
            time.sleep(0.01)

    def broadcast(self, tensor, src, stream=None):
        (size,) = SIZE.unpack(self._sender.recv(SIZE.size, socket.MSG_WAITALL))
        assert size == tensor.numel()
        assert self._sender.recv_into(tensor.numpy(), size, socket.MSG_WAITALL) == size

    def destroy(self):
        self.available, self.disabled = False, True
        with contextlib.suppress(OSError):
            self._sender.shutdown(socket.SHUT_RDWR)
        self._sender.close()


def install():
    """Nothing, in the process that starts the engine."""
    if os.environ.get(OWNER_ENV) in (None, str(os.getpid())):
        return
    import torch
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    nccl_common.uid_init_process_group = Communicator
    packed_tensor._get_streams = lambda device, count: (stream,) * count
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.accelerator.current_device_index = lambda: 0
