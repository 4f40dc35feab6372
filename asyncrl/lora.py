"""A low-rank adapter (LoRA) in a Hugging Face model, by PEFT: the same in the learner and in engines.

    W x  becomes  W x + (alpha / rank) B A x     of each target, where only A and B are trained

B begins as 0 and A is drawn from a fixed seed, so that every process begins with the same adapter. Tensors
have the names that PEFT writes into adapter_model.safetensors.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.sections import LoraConfig, ModelConfig
from asyncrl.errors import ConfigError, from_extra

if TYPE_CHECKING:
    from torch import Tensor, nn

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# What PEFT puts before the model's own name of a module, and what it puts into it for each adapter.
PREFIX, NAME, BASE = "base_model.model.", ".default", ".base_layer"
# Settings of a start adapter that may have any value: they are compared, or say nothing of its tensors.
ANY_VALUE = {"r", "lora_alpha", "target_modules", "lora_dropout", "base_model_name_or_path", "revision"}
ANY_VALUE |= {"task_type", "peft_version", "auto_mapping", "inference_mode", "runtime_config"}
MERGE = "merge it into its base (merge_and_unload of PEFT), and set model.path to the result"


def base_arguments(model: ModelConfig, device: Any) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load a base in 4 bits onto a device; none for another.

    Raises MissingLibrary.
    """
    if not model.has_4bit_base:
        return {}
    from transformers import BitsAndBytesConfig

    with from_extra("bitsandbytes"):
        import bitsandbytes  # noqa: F401 - transformers says less of what is missing
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=model.dtype,
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def numbers_in_4bit(model: Any) -> int:
    """Return how many numbers of a plain model `load_in_4bit` changes: those of linear layers but the output.

    Raises ConfigError for a model with experts, which bitsandbytes would leave as they are.
    """
    from torch import nn

    if any(parameter.ndim > 2 for parameter in model.parameters()):
        found = f"model.lora.load_in_4bit: {type(model).__name__} has experts, which stay as they are"
        raise ConfigError(f"{found}; remove the key, or choose a model without experts")
    head = model.get_output_embeddings()
    layers = (one for one in model.modules() if isinstance(one, nn.Linear) and one is not head)
    return sum(layer.weight.numel() for layer in layers)


def inject(model: Any, lora: LoraConfig) -> None:
    """Put the adapter into a model, in place, and freeze all other parameters. Raises ConfigError."""
    import torch
    from peft import LoraConfig as Settings
    from peft import inject_adapter_in_model
    from torch import nn

    alpha: Any = lora.alpha  # PEFT asks for a whole number, and takes others
    settings = Settings(r=lora.rank, lora_alpha=alpha, target_modules=_targets_in(model, lora))
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        inject_adapter_in_model(settings, model)
    for _, parameter in adapter_tensors(model):
        parameter.data = parameter.data.to(dtype)  # PEFT makes float32 of bfloat16
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # of bitsandbytes
            # A pass in eval mode would round its scales, and cut off later gradients.
            module.support_avx512bf16_for_cpu = False
            # The base is in no checkpoint, so its scales need not be.
            module._save_to_state_dict = partial(nn.Module._save_to_state_dict, module)
    if lora.start is not None:
        _load(model, lora.start / TENSORS)


def _targets_in(model: Any, lora: LoraConfig) -> list[str]:
    """Return the last names of the layers that get an adapter. Raises ConfigError."""
    from peft import LoraConfig as Settings
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    from torch import nn

    owner, kinds = type(model).__name__, dict(model.named_modules())
    linear = [name for name, kind in kinds.items() if isinstance(kind, nn.Linear)]
    # Blocks are numbered: `model.layers.0.mlp.up_proj`.
    blocks = {name for name in linear if any(part.isdigit() for part in name.split("."))}
    # PEFT takes out the names that experts had, and refuses one of these two without the other.
    left = Settings(target_modules=["gate_proj", "up_proj", *map(_last, blocks)])
    convert_peft_config_for_transformers(left, model, None)
    offered = sorted({*map(_last, blocks)}.intersection(left.target_modules or ()))
    if not offered:
        raise ConfigError(f"model.lora: {owner} has no linear layers in its blocks; remove model.lora")
    for target in lora.targets:
        named = [name for name in kinds if _last(name) == target]
        if target not in offered or not blocks.issuperset(named):
            kind = "which PEFT takes for experts" if blocks >= {*named} else "no linear layer of a block"
            found = f"is {named[0]}, {kind}" if named else "names no layer"
            cure = f"{', '.join(offered)}: output layer and embeddings are shared or sampled from"
            raise ConfigError(f"model.lora.targets: {target} {found} of {owner}; allowed are {cure}")
    return sorted(set(lora.targets)) or offered


def adapter_plan(model: ModelConfig, lora: LoraConfig) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """PEFT's settings of the adapter and the shapes of its tensors, from the model without its weights.

    Raises ConfigError, DataError.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = model.architecture()
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    settings = peft_config(lora, model, _targets_in(policy, lora))
    inject(policy, lora)
    return settings, {name: list(parameter.shape) for name, parameter in adapter_tensors(policy)}


def adapter_tensors(model: "nn.Module") -> Iterator[tuple[str, "nn.Parameter"]]:
    """Yield the parameters of the adapter under the names that PEFT gives them on disk."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            yield PREFIX + name.replace(NAME, ""), parameter


def base_parameters(model: "nn.Module") -> Iterator[tuple[str, "nn.Parameter"]]:
    """Yield the parameters without the adapter, under the names that they have without it."""
    for name, parameter in model.named_parameters():
        if ".lora_A." not in name and ".lora_B." not in name:
            yield name.replace(BASE, ""), parameter


def merged(
    base: Iterable[tuple[str, "Tensor"]], adapter: dict[str, "Tensor"], lora: LoraConfig
) -> Iterator[tuple[str, "Tensor"]]:
    """Yield the tensors of the base, those of targets as W + (alpha / rank) B A, in the type of W."""
    for name, tensor in base:
        module = PREFIX + name.removesuffix(".weight")
        if (down := adapter.get(f"{module}.lora_A.weight")) is None:
            yield name, tensor
        else:
            up = adapter[f"{module}.lora_B.weight"]
            change = (up.float() @ down.float()) * (lora.alpha / lora.rank)
            yield name, (tensor.float() + change.to(tensor.device)).to(tensor.dtype)


@contextmanager
def adapters_off(model: "nn.Module") -> Iterator[None]:
    """Let a model compute what it would without its adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def peft_config(lora: LoraConfig, model: ModelConfig, targets: Iterable[str]) -> dict[str, Any]:
    """Return the content of adapter_config.json, with the name or path of the base, and its revision."""
    whole = lora.alpha.is_integer()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.path,
        "revision": model.revision,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if whole else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "inference_mode": True,
    }


def require_usable(lora: LoraConfig, base: str) -> None:
    """Raise ConfigError if `lora.start` is another kind of adapter than ours, or one of another model."""
    if lora.start is None:
        return
    from peft import LoraConfig as Settings

    where, place = "model.lora.start", lora.start / SETTINGS
    try:
        found = dict(json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {place}: {error}; give a directory that PEFT has written") from error
    if not (lora.start / TENSORS).is_file():
        raise ConfigError(f"{where}: {lora.start} has no {TENSORS}; save the adapter with safetensors")
    usual = vars(Settings()) | {"peft_type": "LORA"}
    other = {key: value for key, value in found.items() if key not in ANY_VALUE and value}
    # "gaussian" says only how A was drawn; other names say that the base was changed, too.
    other = {key: value for key, value in other.items() if value not in (usual.get(key), "gaussian")}
    if other:
        key, value = next(iter(other.items()))
        raise ConfigError(f"{where}: {place} has {key}: {value}, which is not plain LoRA; {MERGE}")
    for ours, theirs in (("rank", "r"), ("alpha", "lora_alpha")):
        if found.get(theirs) != (own := getattr(lora, ours)):
            text = f"model.lora.{ours}: found {own}, but {place} has {theirs}: {found.get(theirs)}"
            raise ConfigError(f"{text}; set model.lora.{ours} to that")
    theirs = found.get("base_model_name_or_path") or base
    if theirs != base and not (Path(theirs).exists() and Path(base).exists() and Path(theirs).samefile(base)):
        text = f"{where}: {place} is an adapter of {theirs}, but model.path is {base}; set model.path to that"
        raise ConfigError(f"{text} model, or correct base_model_name_or_path if both are the same")


def _load(model: Any, file: Path) -> None:
    """Copy the tensors of an adapter into that of the model. Raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    ours = dict(adapter_tensors(model))
    try:
        with safe_open(file, framework="pt") as found:
            theirs = {name: tuple(found.get_slice(name).get_shape()) for name in found.keys()}  # noqa: SIM118
            apart = sorted(ours.keys() ^ theirs.keys())
            apart += [name for name in ours if name in theirs and theirs[name] != tuple(ours[name].shape)]
            if apart:
                raise ConfigError(
                    f"model.lora.start: {file} has not the tensors of this model and model.lora.targets: "
                    f"{len(apart)} are missing, unknown or of another shape, first {apart[0]}; set "
                    f"model.lora.targets to the target_modules of its {SETTINGS}"
                )
            for name, parameter in ours.items():
                parameter.data.copy_(found.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.lora.start: {file}: {error}; copy it again") from error


def _last(name: str) -> str:
    return name.rpartition(".")[2]
