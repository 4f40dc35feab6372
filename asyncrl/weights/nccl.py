"""The NCCL sender, one process for all generators: slots of the learner's GPU -> vLLM's packed broadcast.

`python -m asyncrl.weights.nccl <socket fd> <learner pid>` owns the communicators, so a failure or a hang ends
this process and not the learner. Over the socket it gets a channel for each generator, and serves it in a
thread with a communicator and a CUDA stream of its own. The messages of a channel are framed as in
`asyncrl.workers`:

    {op: prepare, layout, workers, slot}  ->  {op: prepared, details} | {op: failed, reason}
    {op: transfer}                        ->  {op: sent} | {op: failed, reason}

The rendezvous is the 128-byte unique id in the update order; it needs no store and no port. Both ends must
enter the group together. The learner bounds the wait: it kills this process after the deadline.
"""

import base64
import contextlib
import socket
import sys
import threading
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

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
_opening = threading.Lock()
# Streams of channels that are closed: torch keeps the freed buckets of a stream for that stream.
_streams: list[Any] = []


@dataclass(slots=True)
class NcclSender:
    """One communicator, used until it fails. Its details in an order: `init` (new groups only), `update`."""

    layout: Layout
    # The generator's tensor-parallel workers; each of them receives everything.
    workers: int
    _unique_id: bytes = b""
    _communicator: Any = None
    _stream: Any = None

    def prepare(self) -> dict[str, Any]:
        """Return the details of the update order, without checksums. Raises TransferError."""
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
        return {"init": None if self._communicator else self._new_init(), "update": update}

    def transfer(self, buffer: Tensor) -> None:
        """Send a slot, while the generator receives the order. Raises TransferError.

        Nothing here waits for another generator: vLLM's own producer would share two streams among all.
        """
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
        from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

        with torch.cuda.stream(self._stream):
            if self._communicator is None:
                self._communicator = uid_init_process_group(
                    self._unique_id, rank=0, world_size=1 + self.workers, device=torch.cuda.current_device()
                )
            if self._communicator.disabled:  # it would accept every call and send nothing
                raise TransferError(
                    "nccl: vLLM disabled its communicator; its NCCL library could not be loaded or used"
                )
            tensors = ((spec.name, self.layout.view(buffer, i)) for i, spec in enumerate(self.layout.specs))
            while chunk := pack_tensors(tensors, itemgetter(1), self.layout.bucket_bytes):
                self._communicator.broadcast(chunk.packed_tensor, src=0)
        self._stream.synchronize()

    def close(self) -> None:
        """Free the communicator."""
        if self._communicator:
            self._communicator.destroy()
        if self._stream:
            _streams.append(self._stream)

    def _new_init(self) -> dict[str, Any]:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        with _opening:
            if self._stream is None:
                self._stream = _streams.pop() if _streams else torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return {
            "nccl_unique_id_b64": base64.b64encode(self._unique_id).decode(),
            "rank_offset": 1,
            "world_size": 1 + self.workers,
            "packed": True,
            "packed_buffer_size_bytes": self.layout.bucket_bytes,
            "packed_num_buffers": _BUFFERS,
        }


@lru_cache(maxsize=1)
def _opened(slot: bytes, size_bytes: int) -> Tensor:
    """A slot, opened once for all generators. It stays as it is while the learner counts its readers."""
    return open_slot(msgpack.unpackb(slot), size_bytes, device=0).buffer


def serve(channel: socket.socket) -> None:
    """Answer the commands for one generator until the learner closes the channel."""
    sender, buffer = None, torch.empty(0)
    # ConnectionError, EOFError: the learner has closed the channel.
    with channel, channel.makefile("rb") as commands, contextlib.suppress(EOFError, ConnectionError):
        while True:
            command = msgpack.unpackb(receive(commands))
            try:
                if command["op"] == "prepare":
                    layout = Layout.from_plain(command["layout"])
                    sender = sender or NcclSender(layout, command["workers"])
                    with _opening:
                        buffer = _opened(msgpack.packb(command["slot"]), layout.total_bytes)
                    reply: dict[str, Any] = {"op": "prepared", "details": sender.prepare()}
                else:
                    assert sender is not None, "transfer without prepare"
                    sender.transfer(buffer)
                    reply = {"op": "sent"}
            except TransferError as error:
                reply = {"op": "failed", "reason": str(error)}
            channel.sendall(pack(reply))
    if sender:
        sender.close()


def main() -> None:
    """Entry point of the process."""
    die_with_parent(int(sys.argv[2]))
    refuse_pickles_from_wires()
    with socket.socket(fileno=int(sys.argv[1])) as learner:
        while files := socket.recv_fds(learner, 1, 1)[1]:
            channel = socket.socket(fileno=files[0])
            threading.Thread(target=serve, args=(channel,), daemon=True).start()


if __name__ == "__main__":
    main()
