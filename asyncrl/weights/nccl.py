"""Sending over NCCL to vLLM's own `nccl` engine: slot -> this process's GPU -> packed broadcast.

The rendezvous is the 128-byte unique id in the update order; it needs no store and no port. Both ends must
enter the group together. The learner bounds the wait: it kills this process when the deadline has passed.
"""

import base64
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.errors import TransferError
from asyncrl.weights.transports import Job, SenderSetup

_BUFFERS = 2


@dataclass(slots=True)
class NcclTransport:
    """One communicator, used until it fails. An order's details are `init` (new groups only) and `update`."""

    setup: SenderSetup
    _unique_id: bytes = b""
    _communicator: Any = None

    def prepare(self, job: Job) -> dict[str, Any]:
        """Describe the tensors, and a new group if there is none yet."""
        if not torch.cuda.is_available():
            raise TransferError(
                "nccl transport: this host shows no CUDA device to the sender; use gloo or disk"
            )
        specs = self.setup.layout.specs
        return {
            "init": None if self._communicator else self._new_init(),
            "update": {
                "names": [spec.name for spec in specs],
                "dtype_names": [spec.dtype for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
            },
        }

    def transfer(self, job: Job) -> None:
        """Join the group on first use, then broadcast from rank 0."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        if self._communicator is None:
            self._communicator = uid_init_process_group(
                self._unique_id, rank=0, world_size=1 + self.setup.workers, device=torch.cuda.current_device()
            )
        # A disabled communicator accepts every call and sends nothing.
        if self._communicator.disabled:
            raise TransferError(
                "nccl transport: vLLM disabled its communicator; its NCCL library could not be loaded or used"
            )
        packed_nccl_broadcast_producer(
            iterator=(
                (spec.name, self.setup.layout.view(job.buffer, index).to("cuda"))
                for index, spec in enumerate(self.setup.layout.specs)
            ),
            group=self._communicator,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self.setup.layout.bucket_bytes,
            num_buffers=_BUFFERS,
        )
        torch.cuda.synchronize()

    def _new_init(self) -> dict[str, Any]:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        return {
            "nccl_unique_id_b64": base64.b64encode(self._unique_id).decode(),
            "rank_offset": 1,
            "world_size": 1 + self.setup.workers,
            "packed": True,
            "packed_buffer_size_bytes": self.setup.layout.bucket_bytes,
            "packed_num_buffers": _BUFFERS,
        }
