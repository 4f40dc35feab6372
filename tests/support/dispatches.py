"""How many kernels the host starts for a micro-batch: operators, counted on tensors without numbers."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.batch.packing import TrainSample, microbatch
from asyncrl.trainer.attention import VARLEN
from asyncrl.trainer.policy import PolicyModule, run

META = torch.device("meta")
LAYERS = 24


# Operators whose result, or its size, the host must know, so that it waits for the device.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "equal"}
# Methods that copy to the host, and start no operator on a CPU.
COPYING = ("tolist", "cpu", "numpy")


class Dispatches(TorchDispatchMode):
    """Counts operators but for views, which start no kernel, and waits of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.waits = 0
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        for name in COPYING:
            self._patches.enter_context(mock.patch.object(torch.Tensor, name, self._counted(name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or func is torch.ops.aten._unsafe_view.default)
        by_mask = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        self.waits += by_mask or func.overloadpacket.__name__ in WAITING
        return func(*args, **(kwargs or {}))

    def _counted(self, name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        def copied(tensor: torch.Tensor, *given: Any) -> Any:
            self.waits += 1
            return method(tensor, *given)

        return copied


def samples_of(*lengths: int) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    return [
        TrainSample(
            prompt_ids=rng.integers(2, 40, 3, dtype=np.int32),
            response_ids=rng.integers(2, 40, length, dtype=np.int32),
            keep=np.ones(length, np.bool_),
            behaviour_logprobs=np.zeros(length, np.float32),
            advantages=np.ones(length, np.float32),
            lag=np.zeros(length, np.int64),
        )
        for length in lengths
    ]


def dispatches_of(sequences: int) -> int:
    """Of the forward and backward pass of one micro-batch with so many sequences, on `LAYERS` layers of Qwen2."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen2", num_hidden_layers=LAYERS, vocab_size=40, **sizes)
    with META:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=VARLEN
        ).train()
    batch = microbatch(samples_of(*[2] * sequences), META)
    with Dispatches() as dispatches:
        columns_RT = run(PolicyModule(model), batch, target_T=batch.target_T, temperature=1.0, chunk=1024)
        columns_RT[0].sum().backward()
    return dispatches.count
