"""How many kernels the host starts for a micro-batch: operators, counted on tensors without numbers."""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.batch.packing import TrainSample, microbatch
from asyncrl.trainer.attention import VARLEN
from asyncrl.trainer.policy import PolicyModule, run

META = torch.device("meta")
LAYERS = 24


class Dispatches(TorchDispatchMode):
    """Counts operators but for views, which start no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not (func.is_view or func is torch.ops.aten._unsafe_view.default)
        return func(*args, **(kwargs or {}))


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
