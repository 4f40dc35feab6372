"""The NCCL sender, one process per generator: a slot of the learner's GPU -> vLLM's own packed broadcast.

`python -m asyncrl.weights.nccl <socket fd> <learner pid>` owns the communicator, so a failure or a hang ends
this process and not the learner. The messages are framed as in `asyncrl.workers`:

    {op: prepare, layout, workers, slot, checksums}  ->  {op: prepared, details} | {op: failed, reason}
    {op: transfer}                                   ->  {op: sent, seconds} | {op: failed, reason}

The rendezvous is the 128-byte unique id in the update order; it needs no store and no port. Both ends must
enter the group together. The learner bounds the wait: it kills this process after the deadline.
"""

import base64
import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgpack
import torch
from torch import Tensor

from asyncrl.errors import TransferError
from asyncrl.processes import die_with_parent
from asyncrl.unpickling import refuse_pickles_from_wires
from asyncrl.weights.layout import Layout
from asyncrl.weights.slots import open_slot
from asyncrl.workers import pack, receive

_BUFFERS = 2


@dataclass(slots=True)
class NcclSender:
    """One communicator, used until it fails. An order's details are `init` (new groups only) and `update`."""

    layout: Layout
    # The generator's tensor-parallel workers; each of them receives everything.
    workers: int
    _unique_id: bytes = b""
    _communicator: Any = None

    def prepare(self, checksums: Sequence[int]) -> dict[str, Any]:
        """Return the details of the update order. Raises TransferError."""
        if not torch.cuda.is_available():
            raise TransferError(
                "nccl: this host shows no CUDA device to the sender; leave weights.transport auto"
            )
        specs = self.layout.specs
        update = {
            "names": [spec.name for spec in specs],
            "dtype_names": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
        }
        init = None if self._communicator else self._new_init()
        return {"init": init, "update": update, "checksums": list(checksums)}

    def transfer(self, buffer: Tensor) -> None:
        """Send a slot, while the generator receives the order. Raises TransferError."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        if self._communicator is None:
            self._communicator = uid_init_process_group(
                self._unique_id, rank=0, world_size=1 + self.workers, device=torch.cuda.current_device()
            )
        if self._communicator.disabled:  # it would accept every call and send nothing
            raise TransferError(
                "nccl: vLLM disabled its communicator; its NCCL library could not be loaded or used"
            )
        packed_nccl_broadcast_producer(
            iterator=(
                (spec.name, self.layout.view(buffer, index).to("cuda"))
                for index, spec in enumerate(self.layout.specs)
            ),
            group=self._communicator,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self.layout.bucket_bytes,
            num_buffers=_BUFFERS,
        )
        torch.cuda.synchronize()

    def _new_init(self) -> dict[str, Any]:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        return {
            "nccl_unique_id_b64": base64.b64encode(self._unique_id).decode(),
            "rank_offset": 1,
            "world_size": 1 + self.workers,
            "packed": True,
            "packed_buffer_size_bytes": self.layout.bucket_bytes,
            "packed_num_buffers": _BUFFERS,
        }


def serve(channel: socket.socket, commands: BinaryIO) -> None:
    """Answer commands. Raises EOFError when the learner closes the channel."""
    sender, buffer = None, torch.empty(0)
    while True:
        command = msgpack.unpackb(receive(commands))
        try:
            if command["op"] == "prepare":
                layout = Layout.from_plain(command["layout"])
                sender = sender or NcclSender(layout, command["workers"])
                # The slot stays as it is until the transfer is over: the learner counts this reader.
                buffer = open_slot(command["slot"], layout.total_bytes, device=0).buffer
                reply: dict[str, Any] = {"op": "prepared", "details": sender.prepare(command["checksums"])}
            else:
                assert sender is not None, "transfer without prepare"
                started_s = time.monotonic()
                sender.transfer(buffer)
                reply = {"op": "sent", "seconds": time.monotonic() - started_s}
        except TransferError as error:
            reply = {"op": "failed", "reason": str(error)}
        channel.sendall(pack(reply))


def main() -> None:
    """Entry point of the process."""
    die_with_parent(int(sys.argv[2]))
    refuse_pickles_from_wires()
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel, contextlib.suppress(EOFError, ConnectionError):  # the learner has closed it
        serve(channel, channel.makefile("rb"))


if __name__ == "__main__":
    main()
