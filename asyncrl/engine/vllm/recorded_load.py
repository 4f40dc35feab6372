"""Copies a version straight to where vLLM's loaders would put its tensors.

    learn   the model's loaders run once on tensors without data; each copy into a parameter is recorded
    load    the copies are repeated, layer by layer

A layer whose kernels read the parameters as they were loaded is written in place. So is one of which vLLM
only makes a copy in another form, such as an embedding on a CPU; it makes this copy again. For any other,
such as a quantised one, vLLM makes the kernels' tensors again from a temporary copy, and writes them in
place, as in its own reload. CUDA graphs go on reading where they were recorded.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import (
    _copy_and_restore_kernel_tensors,
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    materialize_layer,
    restore_layer_on_meta,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

from asyncrl.engine.vllm.layerwise import abandon, open_reload, repack_experts, repack_tied
from asyncrl.weights.base import TensorSpec

log = logging.getLogger(__name__)
aten: Any = torch.ops.aten


class _NotRepeatableError(Exception):
    """A loader does more than to copy tensors of the checkpoint into parameters."""


class _Region(NamedTuple):
    """Part of a tensor, as `as_strided` takes it; the offset counts from the tensor's first element."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class _Write(NamedTuple):
    """One write into a parameter of a layer: a part of a named tensor, or else one number (padding)."""

    parameter: str
    into: _Region
    source: str | None
    part: _Region | None
    number: float

    def repeat(self, layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        region = self.into.of(layer._parameters[self.parameter].data)  # type: ignore[union-attr]
        if self.source is None or self.part is None:
            region.fill_(self.number)
        else:
            region.copy_(self.part.of(tensors[self.source]))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes of known tensors into known parameters, and does not execute them.

    Apart from views, any other use of their memory raises _NotRepeatableError.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: dict[nn.Module, list[_Write]] = {}
        self._tensors = {_memory(tensor): (name, tensor) for name, tensor in tensors.items()}
        self._parameters = {
            _memory(tensor): (layer, name, tensor)
            for layer in model.modules()
            for name, tensor in get_layer_tensors(layer).items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = [_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.is_view or not any(each in self._parameters or each in self._tensors for each in used):
            return func(*args, **(kwargs or {}))
        layer, name, parameter = self._parameters.get(used[0], (None, "", args[0]))
        if layer is None or name not in layer._parameters:
            raise _NotRepeatableError(f"{func} does not write into a parameter")
        if func is aten.fill_.Scalar:
            write = _Write(name, _region(args[0], parameter), None, None, args[1])
        elif func is aten.copy_.default and used[1] in self._tensors:
            source, tensor = self._tensors[used[1]]
            write = _Write(name, _region(args[0], parameter), source, _region(args[1], tensor), 0.0)
        else:
            raise _NotRepeatableError(f"{func} writes into {name}")
        self.writes.setdefault(layer, []).append(write)
        return args[0]


class _Idle(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether no tensor operation runs in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.holds = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.holds = False
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Placed:
    """A layer and the writes that fill all of its parameters."""

    layer: nn.Module
    writes: list[_Write]
    # Whether vLLM leaves the parameters where they are loaded; None before the first load.
    in_place: bool | None = None
    # Whether it makes nothing of them either.
    plain: bool = False

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if not self.in_place:
            # As vLLM's reload does: give the layer the parameters that it was built with.
            layer, info = self.layer, get_layerwise_info(self.layer)
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            info.load_numel_total = 0  # so `abandon` puts the kernels' tensors back
            restore_layer_on_meta(layer, info)
            materialize_layer(layer, info)
        for write in self.writes:
            write.repeat(self.layer, tensors)
        if not self.in_place:
            self._close()
        elif not self.plain:
            self._process()

    def _close(self) -> None:
        """Let vLLM make the kernels' tensors of the loaded ones, and see whether it changes any."""
        layer, info = self.layer, get_layerwise_info(self.layer)
        if self.in_place is None:
            held, places, idle = _held(layer), _places(layer), _Idle()
            with idle:
                self._process()
            kernels: Any = info.kernel_tensors
            self.in_place = places == _places(layer) and all(
                _geometry(kernels[0][name]) == _geometry(loaded)
                for name, loaded in layer._parameters.items()
                if loaded is not None
            )
            same = [id(each) for each in held] == [id(each) for each in _held(layer)]
            self.plain = self.in_place and idle.holds and same
        else:
            self._process()
        _copy_and_restore_kernel_tensors(layer, info)
        info.reset()

    def _process(self) -> None:
        """Let vLLM make of the loaded parameters what the kernels need."""
        layer = self.layer
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)
            repack_experts(layer)


class Placement:
    """Where the tensors of one layout belong in a model."""

    def __init__(self, model: nn.Module, layers: Sequence[_Placed]) -> None:
        self.layers = layers
        self._model = model
        self._attention = [layer for layer in model.modules() if is_deferred_attention_layer(layer)]

    def load(self, tensors: Mapping[str, Tensor], model_config: Any) -> None:
        """Load all of them. After an exception the weights are a mixture of versions."""
        try:
            for placed in self.layers:
                placed.load(tensors)
        except BaseException:
            abandon(self._model)
            raise
        attention: Any
        for attention in self._attention:  # it may derive tensors from other layers' parameters
            attention.process_weights_after_loading(model_config.dtype)
        repack_tied(self._model)


def learn(model: nn.Module, specs: Sequence[TensorSpec]) -> Placement | None:
    """Find out where tensors with these names and shapes belong; None if only vLLM's reload can load them.

    That is so if a loader computes with values, or if a layer or a parameter would stay incomplete.
    """
    tensors = {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
    }
    try:
        wanted = open_reload(model)
        for layer in model.modules():
            for tensor in get_layer_tensors(layer).values():
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = _get_original_loader(tensor)
        with _Recorder(model, tensors) as recorder:
            load_weights: Any = model.load_weights
            unsent = wanted - load_weights(iter(tensors.items()))
        unsent |= {
            name for name in wanted if model.get_submodule(name.rpartition(".")[0]) not in recorder.writes
        }
        if unsent:
            raise _NotRepeatableError(f"{len(unsent)} parameters would not be written, such as {min(unsent)}")
        for layer, writes in recorder.writes.items():
            _require_whole(layer, writes)
    except Exception as error:  # noqa: BLE001  # vLLM's reload knows what to do, or says what is wrong
        log.info("vLLM reloads this model: %s: %s", type(error).__name__, error)
        return None
    finally:
        abandon(model)
        setattr(model, "_do_torchao_reload", getattr(model, "_original_do_torchao_reload", False))  # noqa: B010
    layers = [_Placed(layer, recorder.writes[layer]) for layer in model.modules() if layer in recorder.writes]
    return Placement(model, layers)


def _require_whole(layer: nn.Module, writes: Sequence[_Write]) -> None:
    """Raise _NotRepeatableError unless the writes reach each element of the layer's tensors."""
    if is_deferred_attention_layer(layer):
        raise _NotRepeatableError(f"{type(layer).__name__} has scales of its own")
    for name, tensor in get_layer_tensors(layer).items():
        if name in layer._non_persistent_buffers_set or name in SKIP_LOAD_TENSORS:
            continue
        reached = torch.zeros(
            tensor.untyped_storage().nbytes() // tensor.itemsize,
            dtype=torch.bool,
            device=get_layerwise_info(layer).restore_device,
        )
        for write in writes:
            if write.parameter == name:
                write.into.of(reached).fill_(True)
        if not _region(tensor, tensor).of(reached).all():
            raise _NotRepeatableError(f"{type(layer).__name__}.{name} would stay incomplete")


def _memory(tensor: Tensor) -> int:
    """What views of one tensor have in common, also without data."""
    return int(tensor.untyped_storage()._cdata)


def _region(view: Tensor, tensor: Tensor) -> _Region:
    """Where `view` is in `tensor`. Raises _NotRepeatableError if it is of another dtype."""
    if view.dtype != tensor.dtype:
        raise _NotRepeatableError(f"a loader reads {tensor.dtype} as {view.dtype}")
    offset = int(view.storage_offset() - tensor.storage_offset())
    return _Region(tuple(view.shape), tuple(view.stride()), offset)


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _places(layer: nn.Module) -> list[Any]:
    """Which tensors a layer has, and where their elements are."""
    return [
        (name, id(tensor), tensor.data_ptr(), _geometry(tensor))
        for name, tensor in get_layer_tensors(layer).items()
    ]


def _held(layer: nn.Module) -> list[Any]:
    """What a layer and its method hold, in the order in which they got it."""
    method = getattr(layer, "quant_method", None)
    return [
        each
        for held in (vars(layer), layer._parameters, layer._buffers, getattr(method, "__dict__", {}))
        for each in (*held, *held.values())
    ]
