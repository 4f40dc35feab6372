"""Loads weights inside vLLM's worker processes; an update brings the whole model, or adapter, in a slot.

After a failed update the weights are a mixture of versions: the engine must not sample until the next update.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group

from asyncrl.engine.base import require_shapes, require_target
from asyncrl.engine.vllm.adapter import Adapter
from asyncrl.engine.vllm.layerwise import reloading
from asyncrl.engine.vllm.recorded_load import Placement, learn
from asyncrl.errors import ConfigError, TransferError
from asyncrl.weights.layout import Layout, verify
from asyncrl.weights.slots import OpenSlot, open_slot


class VersionLoader:
    """Extends vLLM's worker: a whole update is one call, while requests wait."""

    # A model, the tensors of its updates, and where they belong; None: only vLLM's reload can load them.
    learned: tuple[Any, Any, Placement | None] = (None, None, None)

    # What an update replaces; None: the weights of the model.
    adapter: Adapter | None = None

    def open_adapter(
        self: Any, settings: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], start: str
    ) -> str:
        """Put the first adapter into use, see `Adapter`; return why it failed, or nothing."""

        def load() -> None:
            self.adapter = Adapter(self.model_runner.lora_manager, settings, shapes, start)

        return _attempt(load)

    def load_version(self: Any, target: str, details: Mapping[str, Any], repeats: bool) -> str:
        """Load the slot of an order; return why it failed, or nothing. Without `repeats` vLLM reloads all."""

        def load() -> None:
            require_target(target, "weights" if self.adapter is None else "adapter")
            with set_current_vllm_config(self.vllm_config):
                if self.adapter is None:
                    _load(self, self.get_model(), details, repeats)
                else:
                    _load_adapter(self, self.adapter, details)

        return _attempt(load)


def _attempt(load: Callable[[], None]) -> str:
    """Load; return why that failed, or nothing.

    If a worker raised, vLLM would take unread answers of the workers behind it for those to the next call.
    """
    try:
        load()
    except Exception as error:  # noqa: BLE001 - the engine raises it
        traceback.print_exc()
        is_ours = isinstance(error, TransferError | ConfigError)
        return str(error) if is_ours else f"{type(error).__name__}: {error}"
    return ""


def _load(worker: Any, model: Any, details: Mapping[str, Any], repeats: bool) -> None:
    """Load a slot, unless a worker of the engine cannot. Raises TransferError."""
    layout = Layout.from_plain(details["layout"])
    if worker.learned[:2] != (model, layout.specs):
        moves = worker.vllm_config.parallel_config.enable_eplb  # vLLM moves experts between updates
        worker.learned = (model, layout.specs, None if moves else learn(model, layout.specs))
    placement, model_config = worker.learned[2] if repeats else None, worker.vllm_config.model_config
    slot = _open(worker, layout, details, keep=placement is not None)
    tensors = {spec.name: layout.view(slot.buffer, i) for i, spec in enumerate(layout.specs)}
    if placement is not None:
        placement.load(tensors, model_config)
    else:
        with reloading(model, model_config):
            model.load_weights(tensors.items())
    if worker.device.type == "cuda":
        torch.accelerator.synchronize()
    slot.require_unchanged()


def _load_adapter(worker: Any, adapter: Adapter, details: Mapping[str, Any]) -> None:
    """Replace the adapter by that of a slot, unless a worker of the engine cannot. Raises TransferError."""
    layout = Layout.from_plain(details["layout"])
    require_shapes({spec.name: spec.shape for spec in layout.specs}, adapter.shapes)
    slot = _open(worker, layout, details, keep=True)
    copies = {
        spec.name: layout.view(slot.buffer, i).to("cpu", copy=True) for i, spec in enumerate(layout.specs)
    }
    slot.require_unchanged()
    adapter.replace(copies)
    if worker.device.type == "cuda":
        torch.accelerator.synchronize()


def _open(worker: Any, layout: Layout, details: Mapping[str, Any], *, keep: bool) -> OpenSlot:
    """Open the slot of an order in all workers of the engine. Raises TransferError if one cannot."""
    device = torch.cuda.current_device() if worker.device.type == "cuda" else None
    can_load = False
    try:
        slot = open_slot(details["slot"], layout.total_bytes, device=device, keep=keep)
        # The generator's process has verified slots in memory of the host, and cannot read those on a GPU.
        if details["slot"]["exported"] is not None:
            verify(slot.buffer, layout, details["checksums"])
        can_load = True
    finally:
        votes = torch.tensor([can_load], dtype=torch.int32)
        # Workers scale FP8 weights together, and would wait for one that fails.
        if worker.vllm_config.parallel_config.tensor_parallel_size > 1:
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=get_tp_group().cpu_group)
    if not votes:
        raise TransferError("another worker of this engine cannot read the weights")
    return slot
