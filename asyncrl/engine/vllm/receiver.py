"""Receives weights inside vLLM's worker processes; every update brings the whole model.

    update = {transport, target, deadline_s, details}      from the engine, see `UpdateOrder`

The details, by transport:

    slot    slot, layout, checksums: memory of the learner, or of this host, fetched over TCP
    disk    the same in a file
    nccl    init (new `nccl_unique_id_b64`, offset, size; for a new group), update (names, ...), checksums

After a failed update the weights are a mixture of versions: the engine must not sample until the next update.
"""

import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from asyncrl.engine.vllm.layerwise import reloading
from asyncrl.engine.vllm.recorded_load import Placement, learn
from asyncrl.errors import TransferError
from asyncrl.weights.layout import Layout, checksums, require_equal
from asyncrl.weights.slots import open_slot

Update = dict[str, Any]


class _Receives(WeightTransferEngine):  # type: ignore[misc]  # vLLM is untyped
    """Receives from slots in any of vLLM's engines.

    `update_weights` opens and closes the reload, also after a failure, so the calls around it do nothing.
    """

    # A model, the tensors of its updates, and where they belong; None: only vLLM's reload can load them.
    _learned: tuple[Any, Any, Placement | None] = (None, None, None)

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
    def _loading(self, checksums: Mapping[str, int]) -> Iterator[None]:
        """`reloading` until the device has done all of it; only tensors with a name here are verified."""
        with reloading(self.model, self.model_config, checksums):
            yield
        self._wait()

    def _from_slot(self, details: Update) -> None:
        layout = Layout.from_plain(details["layout"])
        if self._learned[:2] != (self.model, layout.specs):
            moves = self.parallel_config.enable_eplb  # vLLM moves experts between updates
            learned = None if moves else learn(self.model, layout.specs)
            self._learned = (self.model, layout.specs, learned)
        placement = self._learned[2]
        device = torch.cuda.current_device() if self.device.type == "cuda" else None
        slot = open_slot(details["slot"], layout.total_bytes, device=device, keep=placement is not None)
        if slot.buffer.is_cuda:  # the generator's process cannot read it, and has verified the others
            for spec, *sums in zip(
                layout.specs, checksums(slot.buffer, layout), details["checksums"], strict=True
            ):
                require_equal(spec.name, *sums)
        tensors = {spec.name: layout.view(slot.buffer, i) for i, spec in enumerate(layout.specs)}
        if placement is not None:
            placement.load(tensors, self.model_config)
            self._wait()
        else:
            with self._loading({}):
                self.model.load_weights(tensors.items())
        slot.require_unchanged()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.accelerator.synchronize()

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
            with self._loading(dict(zip(update.names, details["checksums"], strict=True))):
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
