"""Activations that are computed again in the backward pass instead of kept: of whole layers, or of MLPs."""

from functools import partial
from typing import Any, Literal

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.errors import ConfigError


def recompute(model: Any, setting: bool | Literal["selective"]) -> None:
    """Prepare a Hugging Face model by `learner.gradient_checkpointing`. Raises ConfigError."""
    if setting == "selective":
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                _recompute_mlp(layer)
    elif setting:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _recompute_mlp(layer: Any) -> None:
    if not hasattr(layer, "mlp"):
        raise ConfigError(
            "learner.gradient_checkpointing: selective recomputes the module `mlp` of each layer, but "
            f"{type(layer).__name__} has none; use true, or false"
        )
    # The module stays in its place, so the names of its parameters and the hooks of ZeRO 3 are unchanged.
    layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=False)
