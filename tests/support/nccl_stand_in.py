"""The process of asyncrl/weights/nccl.py without a GPU and without vLLM, which takes seconds to import.

A group is a socket in place of NCCL. As there, rank 0 waits without end for ranks that never come.
"""

import contextlib
import os
import socket
import struct
import sys
from types import ModuleType, SimpleNamespace

import torch

from asyncrl.weights import nccl

SIZE = struct.Struct("<I")
# As in NCCL, a group that is not destroyed stays.
groups = []


def name_of(unique_id):
    return f"\0asyncrl-nccl-{unique_id.hex()[:32]}"


class Communicator:
    """Rank 0 of a group."""

    disabled = False

    def __init__(self, unique_id, rank, world_size, device):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name_of(unique_id))
            listener.listen()
            self._others = [listener.accept()[0] for _ in range(world_size - 1)]
        groups.append(self)

    def broadcast(self, tensor, src, stream=None):
        for other in self._others:
            other.sendall(SIZE.pack(tensor.numel()) + tensor.numpy().tobytes())

    def destroy(self):
        for other in self._others:
            other.close()


def pack_tensors(iterator, post_iter_func, buffer_size_bytes):
    """Whole tensors, until the bucket is full."""
    taken, size_bytes = [], 0
    for item in iterator:
        taken.append(post_iter_func(item).reshape(-1).view(torch.uint8))
        if (size_bytes := size_bytes + taken[-1].numel()) > buffer_size_bytes:
            break
    return SimpleNamespace(packed_tensor=torch.cat(taken)) if taken else None


class Library:
    def ncclGetUniqueId(self):
        return SimpleNamespace(internal=os.urandom(128))


def main():
    for name, content in {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.pynccl_wrapper": {"NCCLLibrary": Library},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"uid_init_process_group": Communicator},
        "vllm.distributed.weight_transfer.packed_tensor": {"pack_tensors": pack_tensors},
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.Stream = lambda: SimpleNamespace(synchronize=lambda: None)
    torch.cuda.stream = contextlib.nullcontext
    nccl.main()


if __name__ == "__main__":
    main()
