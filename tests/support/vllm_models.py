"""vLLM's models without an engine: built and loaded in this process, on any rank of a tensor-parallel group."""

import tempfile
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.utils import replace_parameter

AS_ON_A_GPU = mock.Mock(**{f"is_{other}.return_value": False for other in ("cpu", "xpu", "rocm")})

CONFIG = type("ModelConfig", (), {"dtype": torch.float32})()
COARSE = 127.0


class Coarse(QuantizeMethodBase):
    """Integers and the scale that they are multiples of, as FP8 has them; the scale is in no checkpoint."""

    def create_weights(self, layer, *sizes, **attributes):
        raise NotImplementedError

    def apply(self, layer, *inputs):
        return inputs[0] @ (layer.weight.float() * layer.weight_scale).T

    def process_weights_after_loading(self, layer):
        scale = layer.weight.abs().max() / COARSE
        replace_parameter(layer, "weight", (layer.weight / scale).round().to(torch.int8))
        replace_parameter(layer, "weight_scale", scale.reshape(1))


class Model(nn.Module):
    """An embedding with a tied head, a quantised layer, and an attention with the scale of its cache."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.head.weight = self.embed.weight
        self.down.quant_method = Coarse()
        self.attention = nn.Module()
        self.attention.k_scale = KVCacheScaleParameter()

    def load_weights(self, weights):
        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
            loaded.add(name)
        return loaded


@contextmanager
def built(directory, *, rank=0, ranks=1, packed=True, **arguments):
    """(model, its config) on one rank; without `packed`, the linear layers keep their weights, as on GPUs."""
    given = EngineArgs(model=str(directory), dtype="float32", enforce_eager=True, **arguments)
    config = given.create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as meeting:
        parallel_state.init_distributed_environment(1, 0, f"file://{meeting}/file", 0, backend="gloo")
        try:
            parallel_state.initialize_model_parallel(1, 1)
            group = parallel_state.get_tp_group()
            group.rank_in_group, group.world_size = rank, ranks
            platform = linear.current_platform if packed else AS_ON_A_GPU
            with (
                mock.patch.object(linear, "current_platform", platform),
                mock.patch("torch.accelerator.empty_cache"),
                mock.patch.object(vocab_parallel_embedding, "current_platform", platform),
            ):
                yield get_model(vllm_config=config), config.model_config
        finally:
            parallel_state.cleanup_dist_env_and_memory()
