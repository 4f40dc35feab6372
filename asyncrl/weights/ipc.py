"""Sending by CUDA IPC to vLLM's own `ipc` engine: learner and generator share a GPU.

The sender keeps one copy of the weights on the GPU and exports a handle per tensor. Handles cross the wire as
plain values; the receiver restores them with `lift_update`. The copy does not change until the learner
requests the next version, after the generator's report.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage

from asyncrl.weights.transports import Job, SenderSetup, vllm_update

# Positions of the tensor class, the storage class and the dtype among the arguments of `rebuild_cuda_tensor`.
_CLASSES = (0, 4, 5)


@dataclass(slots=True)
class IpcTransport:
    """One copy of the weights on this process's GPU."""

    setup: SenderSetup
    _copy: Tensor | None = None

    def prepare(self, job: Job) -> dict[str, Any]:
        from torch.multiprocessing.reductions import reduce_tensor

        layout = self.setup.layout
        update = vllm_update("ipc", layout)
        if self._copy is None:
            self._copy = torch.empty(layout.total_bytes, dtype=torch.uint8, device="cuda")
        self._copy.copy_(job.buffer)
        torch.cuda.synchronize()
        uuid = str(torch.cuda.get_device_properties(self._copy.device).uuid)
        views = [layout.view(self._copy, index) for index in range(len(layout.specs))]
        handles = [{uuid: _lower(reduce_tensor(view)[1])} for view in views]  # type: ignore[no-untyped-call]
        return {"init": {"packed": False}, "update": update | {"ipc_handles": handles}}

    def transfer(self, job: Job) -> None:
        """Does nothing: the receiver reads the memory itself."""


def lift_update(update: Mapping[str, Any]) -> dict[str, Any]:
    """The `update` part of an order's details in the form of vLLM's `IPCWeightTransferUpdateInfo`."""
    handles = [
        {uuid: _lift(arguments, dtype) for uuid, arguments in handle.items()}
        for handle, dtype in zip(update["ipc_handles"], update["dtype_names"], strict=True)
    ]
    return {**update, "ipc_handles": handles}


def _lower(arguments: tuple[Any, ...]) -> list[Any]:
    plain = [None if position in _CLASSES else value for position, value in enumerate(arguments)]
    return [list(value) if isinstance(value, tuple) else value for value in plain]


def _lift(plain: list[Any], dtype: str) -> tuple[Any, ...]:
    lifted = [tuple(value) if isinstance(value, list) else value for value in plain]
    for position, value in zip(_CLASSES, (Tensor, TypedStorage, getattr(torch, dtype)), strict=True):
        lifted[position] = value
    return tuple(lifted)
