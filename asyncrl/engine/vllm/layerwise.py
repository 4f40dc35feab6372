"""vLLM's own reload of a model: names what is missing, and leaves nothing behind when it fails.

It suits every model, and takes a thousand Python calls for each layer. `recorded_load.py` avoids them.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from asyncrl.errors import TransferError

# vLLM would warn of every layer without own weights at every update. `reloading` finds missing parameters.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@contextmanager
def reloading(model: nn.Module, model_config: Any) -> Iterator[None]:
    """Context for loading all parameters; at its end, vLLM makes the kernels' packed copies again.

    Raises TransferError if parameters were missing.
    """
    loaded: set[str] = set()
    load_weights: Any = model.load_weights

    def recording(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names: set[str] | None = load_weights(weights)
        if names is None:
            raise TransferError(
                f"{type(model).__name__} does not say which parameters it has loaded, so nobody would notice "
                "that some are missing; choose a model whose load_weights in vLLM returns their names"
            )
        loaded.update(names)
        return names

    model.load_weights = recording  # type: ignore[assignment]  # vLLM's receivers call it, too
    wanted = open_reload(model)
    try:
        yield
        _require_all(model, wanted, loaded)
    except BaseException:
        abandon(model)
        raise
    finally:
        del model.load_weights  # restores the class's method
    finalize_layerwise_reload(model, model_config)
    repack_tied(model)
    for layer in model.modules():
        repack_experts(layer)


def open_reload(model: nn.Module) -> set[str]:
    """Give the model the parameters that it was built with; the names of those that a version must bring.

    The learner freezes the vision part of a model, and does not send it.
    """
    tied = _names(model, tied=True) - _names(model, tied=False)
    initialize_layerwise_reload(model)
    mapping: Any = getattr(model, "get_mm_mapping", None)
    parts = mapping() if mapping else None
    frozen = (*parts.tower_model, *parts.connector) if parts else ()
    return {name for name in _names(model, tied=True) - tied if not name.startswith(frozen)}


def abandon(model: nn.Module) -> None:
    """End an open reload: put the kernels' tensors back, and drop what vLLM would mix into the next."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
        info.reset()


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


def repack_tied(model: nn.Module) -> None:
    """Give a layer with the weight of an earlier one, such as a tied output head, what vLLM has made of that.

    vLLM makes the packed copy for the earlier layer only. If the two differ, it makes one of the later, too.
    """
    owners: dict[int, Any] = {}
    layer: Any
    for layer in model.modules():
        weight, method = layer._parameters.get("weight"), getattr(layer, "quant_method", None)
        if weight is None or weight.numel() == 0:
            continue
        owner = owners.setdefault(id(weight), layer)
        if owner is layer or method is None:
            continue
        alike = type(method) is type(getattr(owner, "quant_method", None))
        if alike and getattr(layer, "bias", None) is None and "cpu_linear" in vars(owner):
            layer.cpu_linear = owner.cpu_linear  # a product with the packed weight, on CPUs
        else:
            method.process_weights_after_loading(layer)


def repack_experts(layer: nn.Module) -> None:
    """Pack the experts of a layer for a CPU; vLLM does so at the first load only, unless it quantises."""
    method: Any = getattr(layer, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod) and layer.w13_weight.device.type == "cpu":
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)
