"""A model is built in shards for ZeRO 3, so that no rank ever holds all of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from asyncrl.config.sections import ModelConfig
from asyncrl.trainer.collectives import Ranks
from asyncrl.trainer.deepspeed.engine_settings import shard_settings
from asyncrl.trainer.loading import load_model


def load_in_shards(config: ModelConfig, device: torch.device, ranks: Ranks, **how: Any) -> Any:
    """Load a model as `load_model` does, but with a part of every parameter on each rank."""
    with built_in_shards(config.dtype):
        return load_model(config, device, sharers=ranks, **how)


class _Shards:
    """What transformers asks of its own HfDeepSpeedConfig, which needs accelerate."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def built_in_shards(dtype: str) -> Iterator[None]:
    """Let transformers share out each module's parameters for ZeRO 3, as soon as the module is constructed.

    Rank 0 then reads the checkpoint, one module at a time. DeepSpeed would also convert what
    constructors compute to `dtype`, such as the float32 frequencies of rotary embeddings; `tensor_overrides`
    prevents this.
    """
    shards, init = _Shards(shard_settings(dtype)), deepspeed.zero.Init
    set_hf_deepspeed_config(shards)  # transformers keeps a weak reference
    deepspeed.zero.Init = partial(init, tensor_overrides=())
    try:
        yield
    finally:
        deepspeed.zero.Init = init
        unset_hf_deepspeed_config()
