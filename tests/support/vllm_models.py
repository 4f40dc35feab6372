"""vLLM's models without an engine: built and loaded in this process, on any rank of a tensor-parallel group."""

import tempfile
from contextlib import contextmanager
from unittest import mock

from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.model_loader import get_model

AS_ON_A_GPU = mock.Mock(**{f"is_{other}.return_value": False for other in ("cpu", "xpu", "rocm")})


@contextmanager
def built(directory, *, rank=0, ranks=1, packed=True):
    """(model, its config) on one rank; without `packed`, the linear layers keep their weights, as on GPUs."""
    config = EngineArgs(model=str(directory), dtype="float32", enforce_eager=True).create_engine_config()
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
