"""Receives weights inside vLLM's worker processes; every update reloads the whole model.

    update = {"transport": ..., "deadline_s": ..., "details": ...}     from the engine, see `UpdateOrder`

The details, by transport:

    memory  slot, layout: weights in shared memory, received over Gloo and verified by the generator
    disk    directory: safetensors files with Hugging Face names
    nccl    init (`nccl_unique_id_b64`, offset, size; only for a new group), update (names, dtypes, shapes)
    ipc     init, update: vLLM's own payloads, with the handles as plain values

After a failed update the weights are a mixture of versions: the engine must not sample until the next update.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from asyncrl.errors import TransferError
from asyncrl.weights.ipc import lift_update
from asyncrl.weights.layout import Layout
from asyncrl.weights.slots import open_slot

Update = dict[str, Any]

# vLLM would warn of every layer without own weights at every update. `reloading` finds missing parameters.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@contextmanager
def reloading(model: nn.Module, model_config: Any) -> Iterator[None]:
    """Context for loading all parameters; at its end, vLLM makes the kernels' packed copies again.

    Raises TransferError if parameters were missing.
    """
    wanted = {name for name, _ in model.named_parameters()}  # tied parameters occur once
    loaded: set[str] = set()
    load_weights: Any = model.load_weights

    def recording(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names: set[str] = load_weights(weights)
        loaded.update(names)
        return names

    model.load_weights = recording  # type: ignore[assignment]  # vLLM's receivers call it, too
    initialize_layerwise_reload(model)
    try:
        yield
        if missing := sorted(wanted - loaded):
            raise TransferError(
                f"{len(missing)} of {len(wanted)} parameters were not sent, first {missing[0]!r}"
            )
    except BaseException:
        # Put the kernels' tensors back and drop what was buffered, which vLLM would mix into the next reload.
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                _place_kernel_tensors(layer, info)
            info.reset()
        raise
    finally:
        del model.load_weights  # restores the class's method
    finalize_layerwise_reload(model, model_config)
    _repack_tied(model)


def _repack_tied(model: nn.Module) -> None:
    """Make the packed copy of a tied output head again; vLLM makes only the embedding's."""
    owners: set[nn.Parameter] = set()
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.numel() == 0:
            continue
        method: Any = getattr(layer, "quant_method", None)
        if weight in owners and method is not None:
            method.process_weights_after_loading(layer)
        owners.add(weight)


class _Receives(WeightTransferEngine):  # type: ignore[misc]  # vLLM is untyped
    """Receives from host memory and disk in any of vLLM's engines.

    `update_weights` opens and closes the reload, also after a failure, so the calls around it do nothing.
    """

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Update) -> None:
        """Receive and load one version. Raises TransferError."""
        details, deadline_s = update_info["details"], float(update_info["deadline_s"])
        with reloading(self.model, self.model_config):
            if update_info["transport"] == "memory":
                self.model.load_weights(_from_memory(details))
            elif update_info["transport"] == "disk":
                self.model.load_weights(_from_disk(Path(details["directory"])))
            else:
                self._over_vllm(details, deadline_s)
        if self.device.type == "cuda":
            torch.accelerator.synchronize()

    def _over_vllm(self, details: Update, deadline_s: float) -> None:
        raise TransferError(
            "this engine was started for gloo and disk; start it with the transport that the order names"
        )


class _OverVLLM(_Receives):
    """vLLM's own transports with a deadline: a communicator that does not finish in time is aborted."""

    def _over_vllm(self, details: Update, deadline_s: float) -> None:
        cut_off = threading.Event()

        def abort() -> None:
            cut_off.set()
            self.shutdown()

        watchdog = threading.Timer(deadline_s, abort)
        watchdog.start()
        try:
            if details.get("init") is not None:
                self.shutdown()  # the group of an earlier sender
                self.init_transfer_engine(self.parse_init_info(details["init"]))
            self.receive_weights(self.parse_update_info(details["update"]))
            torch.accelerator.synchronize()
        finally:
            watchdog.cancel()
            if cut_off.is_set():
                raise TransferError(
                    f"the transfer was cut off after {deadline_s:g} s; the next order must bring a new group"
                )


class NcclReceiver(_OverVLLM, NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's packed NCCL broadcast."""

    def receive_weights(self, update_info: Any) -> None:
        if self.model_update_group is None or self.model_update_group.disabled:
            raise TransferError(
                "vLLM has no working NCCL communicator and would receive nothing: NCCL >= 2.29.7 is needed"
            )
        super().receive_weights(update_info)


class IpcReceiver(_OverVLLM, IPCWeightTransferEngine):  # type: ignore[misc]
    """vLLM's CUDA IPC: learner and generator on one GPU."""

    def _over_vllm(self, details: Update, deadline_s: float) -> None:
        try:
            super()._over_vllm({**details, "update": lift_update(details["update"])}, deadline_s)
        finally:
            self._packed_importer.close()  # the sender may reuse its buffer


@dataclass
class _NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: the update itself names the group or the files."""


@dataclass
class _NoUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Empty: updates are plain dictionaries."""


class Receiver(_Receives):
    """Receives from host memory and disk, on CPU and GPU; it has no group to open or close."""

    init_info_cls = _NoInit
    update_info_cls = _NoUpdate

    def init_transfer_engine(self, init_info: _NoInit) -> None:
        pass

    def receive_weights(self, update_info: _NoUpdate) -> None:
        raise NotImplementedError  # `update_weights` does everything

    def shutdown(self) -> None:
        pass


def _from_memory(details: Update) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the slot, valid until the generator receives the next version."""
    layout = Layout.from_plain(details["layout"])
    buffer = open_slot(details["slot"], layout.total_bytes)
    for index, spec in enumerate(layout.specs):
        yield spec.name, layout.view(buffer, index)


def _from_disk(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the directory's safetensors files."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise TransferError(f"{directory} holds no .safetensors file")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)
