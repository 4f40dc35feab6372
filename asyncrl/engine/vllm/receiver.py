"""Receives weights inside vLLM's worker processes; every update reloads the whole model.

    update = {transport, target, deadline_s, details}      from the engine, see `UpdateOrder`

The details, by transport:

    slot    slot, layout, checksums: memory of the learner, or of this host, fetched over TCP
    disk    the same in a file
    nccl    init (new `nccl_unique_id_b64`, offset, size; for a new group), update (names, ...), checksums

After a failed update the weights are a mixture of versions: the engine must not sample until the next update.
"""

import logging
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from asyncrl.errors import TransferError
from asyncrl.weights.layout import Layout, checksum, require_equal
from asyncrl.weights.slots import open_slot

Update = dict[str, Any]

# vLLM would warn of every layer without own weights at every update. `reloading` finds missing parameters.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@contextmanager
def reloading(model: nn.Module, model_config: Any, checksums: Mapping[str, int]) -> Iterator[None]:
    """Context for loading all parameters; at its end, vLLM makes the kernels' packed copies again.

    `checksums`, by name, are those of the tensors that are not verified yet. Raises TransferError if one of
    them differs, or if parameters were missing.
    """
    tied = _names(model, tied=True) - _names(model, tied=False)
    loaded: set[str] = set()
    load_weights: Any = model.load_weights

    def verified(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name in checksums:
                require_equal(name, checksum(tensor), checksums[name])
            yield name, tensor

    def recording(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names: set[str] | None = load_weights(verified(weights))
        if names is None:
            raise TransferError(
                f"{type(model).__name__} does not say which parameters it has loaded, so nobody would notice "
                "that some are missing; choose a model whose load_weights in vLLM returns their names"
            )
        loaded.update(names)
        return names

    model.load_weights = recording  # type: ignore[assignment]  # vLLM's receivers call it, too
    initialize_layerwise_reload(model)
    wanted = _names(model, tied=True) - tied
    try:
        yield
        _require_all(model, wanted, loaded)
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


def _names(model: nn.Module, *, tied: bool) -> set[str]:
    """The parameters that every version must bring; without `tied`, shared ones have one name.

    While a reload is open, the model has the parameters that it was built with, and not those that a kernel
    has made of them, such as the scales of FP8. The scales of a KV cache are optional in a checkpoint.
    """
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=not tied)
        if not isinstance(parameter, KVCacheScaleParameter)
    }


def _require_all(model: nn.Module, wanted: set[str], loaded: set[str]) -> None:
    """Raise TransferError if a parameter of the open reload was not sent, or only a part of it."""
    if missing := sorted(wanted - loaded):
        found = f"{len(missing)} of {len(wanted)} parameters"
    elif missing := _missing_parts(model):
        found = f"{len(missing)} parts of fused parameters"
    if missing:
        raise TransferError(f"{found} were not sent, first {missing[0]!r}")


def _missing_parts(model: nn.Module) -> list[str]:
    """The parts that fused linear layers lack before a reload ends, such as `v_proj.weight` of `qkv_proj`.

    vLLM counts the numbers that a layer has got, and would use an incomplete layer as it is. Embeddings and
    experts may lack numbers, because they are padded.
    """
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    missing = []
    for path, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not isinstance(layer, LinearBase) or info.load_numel >= (info.load_numel_total or 0):
            continue
        parent, _, name = path.rpartition(".")
        got: set[tuple[str, Any]] = set()
        for parameter, call in info.loaded_weights:
            ids = call.arguments.get("loaded_shard_id")
            got.update((parameter, one) for one in (ids if isinstance(ids, tuple) else (ids,)))
        for parameter, _ in layer.named_parameters(recurse=False):
            for i, part in enumerate(fused.get(name, (name,))):
                # A part is known by its number or letter; without either, the whole was sent.
                if not got & {(parameter, one) for one in (None, i, "qkv"[i : i + 1])}:
                    missing.append(f"{parent}.{part}.{parameter}")
    return missing


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
    """Receives from slots in any of vLLM's engines.

    `update_weights` opens and closes the reload, also after a failure, so the calls around it do nothing.
    """

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Update) -> None:
        """Receive and load one version. Raises TransferError."""
        transport, details = update_info["transport"], update_info["details"]
        if update_info["target"] != "weights":
            raise TransferError(f"an update of {update_info['target']!r}; this engine knows only weights")
        if transport in ("slot", "disk"):
            self._from_slot(details)
        else:
            self._over_nccl(details, float(update_info["deadline_s"]))

    @contextmanager
    def _loading(self, names: Sequence[str], checksums: Sequence[int]) -> Iterator[None]:
        """`reloading` until the device has done all of it; only tensors with a name here are verified."""
        with reloading(self.model, self.model_config, dict(zip(names, checksums, strict=True))):
            yield
        if self.device.type == "cuda":
            torch.accelerator.synchronize()

    def _from_slot(self, details: Update) -> None:
        layout = Layout.from_plain(details["layout"])
        device = torch.cuda.current_device() if self.device.type == "cuda" else None
        slot = open_slot(details["slot"], layout.total_bytes, device=device)
        names = [spec.name for spec in layout.specs]
        # The generator's process has verified a slot in host memory; it cannot read one on a GPU.
        unverified = (names, details["checksums"]) if slot.buffer.is_cuda else ((), ())
        with self._loading(*unverified):
            self.model.load_weights((name, layout.view(slot.buffer, i)) for i, name in enumerate(names))
        slot.require_unchanged()

    def _over_nccl(self, details: Update, deadline_s: float) -> None:
        raise TransferError("this engine was not started for nccl; start it with weights.transport=nccl")


class NcclReceiver(_Receives, NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's packed NCCL broadcast; a communicator that does not finish within the deadline is aborted."""

    def _over_nccl(self, details: Update, deadline_s: float) -> None:
        cut_off = threading.Event()

        def abort() -> None:
            cut_off.set()
            self.shutdown()

        update = self.parse_update_info(details["update"])
        watchdog = threading.Timer(deadline_s, abort)
        watchdog.start()
        try:
            if details.get("init") is not None:
                self.shutdown()  # the group of an earlier sender
                self.init_transfer_engine(self.parse_init_info(details["init"]))
            if self.model_update_group is None or self.model_update_group.disabled:
                raise TransferError(
                    "vLLM has no working NCCL communicator and would receive nothing: it needs NCCL >= 2.29.7"
                )
            with self._loading(update.names, details["checksums"]):
                self.receive_weights(update)
        finally:
            watchdog.cancel()
            if cut_off.is_set():
                raise TransferError(
                    f"the transfer was cut off after {deadline_s:g} s; the next order must bring a new group"
                )


class VersionLoader:
    """Extends vLLM's worker: a whole update is one call in place of three, while requests wait."""

    def load_version(self: Any, update: Update) -> str:
        """Return why it failed, or nothing.

        If it raised, vLLM would not read the answers of the workers behind this one, and would take them for
        answers to the next update.
        """
        try:
            self.start_weight_update()
            self.update_weights(update)
            self.finish_weight_update()
        except Exception as error:  # noqa: BLE001 - the engine raises it
            traceback.print_exc()
            return str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
        return ""


@dataclass
class _NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: the update itself names the group or the files."""


@dataclass
class _NoUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Empty: updates are plain dictionaries."""


class Receiver(_Receives):
    """Receives from slots, on CPU and GPU; it has no group to open or close."""

    init_info_cls = _NoInit
    update_info_cls = _NoUpdate

    def init_transfer_engine(self, init_info: _NoInit) -> None:
        pass

    def receive_weights(self, update_info: _NoUpdate) -> None:
        raise NotImplementedError  # `update_weights` does everything

    def shutdown(self) -> None:
        pass
