"""Models are loaded from Hugging Face directories, and the policy is exported to one."""

import json
import re
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint
from transformers import AutoProcessor, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.config.model_files import require_loadable
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.hosting.machine import freeze_vision, model_class, sees_images
from asyncrl.lora import SETTINGS, TENSORS, base_arguments, peft_config
from asyncrl.trainer.attention import choose_attention, of_text
from asyncrl.trainer.collectives import Ranks
from asyncrl.trainer.sequence_parallel import require_divisible

# Names of numbers by which a model computes at random while it trains, in configs and in modules.
DROPOUT = re.compile(r".*(dropout|pdrop|layerdrop|drop_rate|jitter).*")
# Tensors that a message lists.
MOST_NAMED = 3
# What transformers raises, apart from RuntimeError, if it cannot load a model: a restart would not help.
CANNOT_LOAD = (
    *(OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, EOFError),
    *(SafetensorError, UnpicklingError),
)


def load_model(
    config: ModelConfig,
    device: torch.device,
    *,
    gradient_checkpointing: bool | Literal["selective"] = False,
    sequence_parallel: int = 1,
    sharers: Ranks | None = None,
) -> Any:
    """Load a causal language model without dropout, whose vision part, if any, is frozen.

    Raises DataError and ConfigError.

    With `sharers`, those ranks load parts of the model together, and all of them raise what one has found.
    """
    require_loadable(config.path, remote_code=config.trust_remote_code)
    dtype, misfit = getattr(torch, config.dtype), ""
    bits = base_arguments(config, device)
    attention = choose_attention(device, dtype, sequence_parallel=sequence_parallel > 1)
    of_model = config.architecture()
    try:
        model, found = model_class(of_model).from_pretrained(
            config.path,
            dtype=dtype,
            attn_implementation=of_text(of_model, attention),
            **config.hub_options | bits,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
        require_writable(model.generation_config)
        misfits = [
            f"{name} has shape {list(stored)}, by config.json {list(expected)}"
            for name, stored, expected in sorted(found["mismatched_keys"])
        ]
        # transformers fills these at random; a tensor that is tied to another one is not among them.
        misfits += [f"{name} is missing" for name in sorted(found["missing_keys"])]
        more = [f"{len(misfits)} in all"] if len(misfits) > MOST_NAMED else []
        misfit = "; ".join([*misfits[:MOST_NAMED], *more])
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        # With shards only rank 0 reads the checkpoint, and only its transformers raises.
        lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        misfit = "; ".join(lines[:MOST_NAMED])
    except CANNOT_LOAD as error:
        text = f"model.path: {config.path} cannot be loaded as a causal language model ({error})"
        cure = "give a Hugging Face directory with config.json and safetensors, or a hub name"
        raise DataError(f"{text}; {cure}") from error
    if sharers:  # the other ranks would wait for rank 0 in the next collective
        misfit = next(filter(None, map(bytes.decode, sharers.gather(misfit.encode()))), "")
    if misfit:
        text = f"model.path: the tensors of {config.path} do not fit its config.json ({misfit})"
        raise DataError(f"{text}; copy all files from the same model")
    require_divisible(model.config, sequence_parallel)
    recompute(model, gradient_checkpointing)
    freeze_vision(model)
    # Gradient checkpointing needs training mode; without dropout nothing else depends on the mode.
    return without_dropout(model).to(device).train()


def require_writable(generation: Any) -> None:
    """Make a generation config one that transformers writes: it reads others, too. Raises ValueError."""
    if generation is None:
        return
    try:
        generation.validate(strict=True)
    except ValueError:  # most often a temperature without `do_sample`
        generation.do_sample = True
        generation.validate(strict=True)


def recompute(model: Any, setting: bool | Literal["selective"]) -> None:
    """Let a backward pass compute parts again, by `learner.gradient_checkpointing`. Raises ConfigError."""
    if setting == "selective":
        for layer in (one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)):
            if not hasattr(layer, "mlp"):
                found = f"recomputes the module `mlp` of each layer, but {type(layer).__name__} has none"
                raise ConfigError(f"learner.gradient_checkpointing: selective {found}; use true, or false")
            # It stays in its place, so the names of its parameters and the hooks of ZeRO 3 are unchanged.
            layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=False)
    elif setting and not model.supports_gradient_checkpointing:
        found = f"{type(model).__name__} of transformers recomputes no layers"
        raise ConfigError(f"learner.gradient_checkpointing is true, but {found}; set it to false")
    elif setting:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def without_dropout(model: Any) -> Any:
    """Return the model after setting each dropout to 0, of its modules and of its functions.

    With dropout, equal weights would give different log-probabilities, and ratios other than 1 on-policy.
    Layers read its numbers from the config, or copy them when they are built.
    """
    configs = {id(one): one for each in model.modules() if (one := getattr(each, "config", None)) is not None}
    for owner in (*model.modules(), *configs.values()):
        if isinstance(owner, _DropoutNd):
            owner.p = 0.0
        for name, value in vars(owner).items():
            if DROPOUT.fullmatch(name) and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(owner, name, 0.0)
    return model


def export_model(model: Any, config: ModelConfig, state: dict[str, Tensor], directory: Path) -> None:
    """Write a Hugging Face model directory: `state` as safetensors, the model's config and its tokenizer.

    With `config.lora`, `state` is an adapter, and the directory one of PEFT's.
    """
    if config.lora is None:
        # Nothing trains buffers, but routers of experts choose by them.
        buffers = dict(model.named_buffers())
        kept = {name: each for name, each in model.state_dict().items() if name in buffers}
        model.save_pretrained(directory, state_dict=state | kept)
    else:
        directory.mkdir()
        save_file(state, directory / TENSORS, metadata={"format": "pt"})
        settings = peft_config(config.lora, config, {name.split(".")[-3] for name in state})
        (directory / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    load = AutoProcessor if sees_images(model.config) else AutoTokenizer
    try:
        tools = load.from_pretrained(config.path, **config.hub_options)
    except (OSError, ImportError):  # training on text needs neither a processor's files nor its libraries
        tools = AutoTokenizer.from_pretrained(config.path, **config.hub_options)
    config.templated(tools).save_pretrained(directory)
