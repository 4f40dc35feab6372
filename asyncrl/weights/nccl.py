"""Sending over NCCL to vLLM's own `nccl` engine: the learner's slot on its GPU -> packed broadcast.

The rendezvous is the 128-byte unique id in the update order; it needs no store and no port. Both ends must
enter the group together. The learner bounds the wait: it kills this process after the deadline.
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
        if not torch.cuda.is_available():
            raise TransferError(
                "nccl transport: this host shows no CUDA device to the sender; use slot, gloo or disk"
            )
        specs = self.setup.layout.specs
        update = {
            "names": [spec.name for spec in specs],
            "dtype_names": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
        }
        init = None if self._communicator else self._new_init()
        return {"init": init, "update": update, "checksums": list(job.checksums)}

    def transfer(self, job: Job) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        if self._communicator is None:
            self._communicator = uid_init_process_group(
                self._unique_id, rank=0, world_size=1 + self.setup.workers, device=torch.cuda.current_device()
            )
        if self._communicator.disabled:  # it would accept every call and send nothing
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
