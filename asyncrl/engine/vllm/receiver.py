"""Receiving weights inside vLLM's worker processes: one reload of the model per update, whole or not at all.

    update = {"transport": ..., "deadline_s": ..., "details": ...}     from the engine, see `UpdateOrder`

    memory  slot, layout: what the generator received over Gloo and has verified, in shared memory of this host
    disk    directory with safetensors files in Hugging Face names
    nccl    init (a fresh `nccl_unique_id_b64`, offset and size; only with a new group), update (names, dtypes, shapes)
    ipc     init, update: vLLM's own payloads, the handles as plain values

A failed update leaves the model usable for the next one, but its weights are a mixture: the engine must not sample.
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
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
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

# It warns of every layer without weights of its own, at every update; what is really missing is found by `reloading`.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@contextmanager
def reloading(model: nn.Module, model_config: Any) -> Iterator[None]:
    """Load a whole checkpoint inside: kernels' packed copies are made anew, also of the tied output head.

    Raises:
        TransferError: parameters were missing.
    """
    wanted = {name for name, _ in model.named_parameters()}  # tied ones once
    loaded: set[str] = set()
    load_weights: Any = model.load_weights

    def recording(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names: set[str] = load_weights(weights)
        loaded.update(names)
        return names

    model.load_weights = recording  # type: ignore[assignment]  # vLLM's receivers call it too
    initialize_layerwise_reload(model)
    try:
        yield
        if missing := sorted(wanted - loaded):
            raise TransferError(f"{len(missing)} of {len(wanted)} parameters were not sent, first {missing[0]!r}")
    except BaseException:
        _abandon_reload(model)
        raise
    finally:
        del model.load_weights  # the class's own again
    finalize_layerwise_reload(model, model_config)
    _repack_tied(model)


def _abandon_reload(model: nn.Module) -> None:
    """Put the kernels' tensors back and forget what was buffered: vLLM would mix it into the next reload."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
        info.reset()


def _repack_tied(model: nn.Module) -> None:
    """vLLM reloads the embedding, in place, but not the output head that shares it: its packed copy would stay old."""
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
    """Host memory and disk for any of vLLM's engines, and the whole reload within `update_weights`."""

    def start_weight_update(self) -> None:
        """Nothing: the reload begins and ends with the transfer, so that a failed one leaves none open."""

    def finish_weight_update(self) -> None:
        """Nothing: see `start_weight_update`."""

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
        raise TransferError("this engine was started for gloo and disk; start it with the transport that the order names")


class _OverVLLM(_Receives):
    """vLLM's own transports, bounded: a communicator that does not finish in time is aborted."""

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
            self._require_working()
            self.receive_weights(self.parse_update_info(details["update"]))
            torch.accelerator.synchronize()
        finally:
            watchdog.cancel()
            if cut_off.is_set():
                raise TransferError(f"the transfer was cut off after {deadline_s:g} s; the next order must bring a new group")

    def _require_working(self) -> None:
        """Raises TransferError when the group exists but moves nothing."""


class NcclReceiver(_OverVLLM, NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's packed NCCL broadcast."""

    def _require_working(self) -> None:
        if self.model_update_group is None or self.model_update_group.disabled:
            raise TransferError(
                "vLLM has no working NCCL communicator, whose broadcasts do nothing then: NCCL >= 2.29.7 is needed"
            )


class IpcReceiver(_OverVLLM, IPCWeightTransferEngine):  # type: ignore[misc]
    """vLLM's CUDA IPC: learner and generator on one GPU."""

    def _over_vllm(self, details: Update, deadline_s: float) -> None:
        try:
            super()._over_vllm({**details, "update": lift_update(details["update"])}, deadline_s)
        finally:
            self._packed_importer.close()  # the sender may reuse its buffer


@dataclass
class _NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Gloo groups come with the order."""


@dataclass
class _NoUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Orders are plain dictionaries."""


class Receiver(_Receives):
    """Host memory and disk, on CPU and GPU."""

    init_info_cls = _NoInit
    update_info_cls = _NoUpdate

    def init_transfer_engine(self, init_info: _NoInit) -> None:
        """Nothing: a group comes with the order."""

    def receive_weights(self, update_info: _NoUpdate) -> None:
        """Not called: `update_weights` does it all."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Nothing is held."""


def _from_memory(details: Update) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the slot; they hold until the generator receives the next version."""
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
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                yield name, tensors.get_tensor(name)
