"""Names and arguments of vLLM that asyncrl uses: a vLLM that moves one fails here, and not in a run on a GPU."""

import inspect
from dataclasses import fields

import pytest
import vllm.envs
from vllm import AsyncEngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.utils.system_utils import get_mp_context
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.config.vllm_settings import REFUSED, known_settings
from asyncrl.engine.vllm.args import engine_args, set_environment
from asyncrl.engine.vllm.classifier import classifier_args
from asyncrl.engine.vllm.receiver import VersionLoader
from asyncrl.launch.scorer_process import PROBE_S
from tests.support.models import tiny_qwen2

pytestmark = pytest.mark.integration


def parameters_of(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("transport", ["auto", "slot", "nccl", "tcp", "disk"])
def test_vllm_accepts_the_arguments_of_every_device_and_transport(device, transport):
    arguments = engine_args(
        ModelConfig(path="model"),
        GeneratorConfig(),
        SamplingConfig(),
        WeightsConfig(transport=transport),
        device=device,
    )
    accepted = AsyncEngineArgs(**arguments)
    assert {name: getattr(accepted, name) for name in arguments} == arguments


def test_the_settings_of_a_config_are_those_of_the_installed_vllm_and_never_ours():
    assert known_settings() == {field.name for field in fields(AsyncEngineArgs) if field.name[0] != "_"}
    assert REFUSED.keys() <= known_settings()
    for device in ("cpu", "cuda"):
        ours = engine_args(
            ModelConfig(path="m"), GeneratorConfig(), SamplingConfig(), WeightsConfig(), device=device
        )
        # The user's are merged with ours, or replace them.
        assert (
            ours.keys() - {"hf_overrides", "max_num_batched_tokens", "block_size", "seed"} <= REFUSED.keys()
        )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_settings_pass_through_to_vllm(device):
    settings = {
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "max_num_batched_tokens": 4096,
        "seed": 7,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        "hf_overrides": {"head_dtype": "float32"},
    }
    generator = GeneratorConfig(vllm=settings)
    arguments = engine_args(
        ModelConfig(path="m"), generator, SamplingConfig(), WeightsConfig(), device=device
    )
    accepted = AsyncEngineArgs(**arguments)
    assert {name: getattr(accepted, name) for name in settings} == settings


def test_a_gpu_runs_the_newer_model_runner_whatever_transport_and_settings(tmp_path):
    """It needs Triton, which knows no CPU; here vLLM only says whether it would take our arguments."""
    generator = GeneratorConfig(vllm={"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}})
    arguments = engine_args(
        ModelConfig(path=str(tiny_qwen2(tmp_path)), dtype="float32"),
        generator,
        SamplingConfig(max_prompt_tokens=64, max_response_tokens=64),
        WeightsConfig(transport="nccl"),
        device="cuda",
    )
    config = AsyncEngineArgs(**arguments).create_engine_config()
    assert config._get_v2_model_runner_unsupported_features() == []
    assert config.model_config.logprobs_mode == "processed_logprobs"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_accepts_the_arguments_of_a_scorer(device):
    generator = GeneratorConfig(gpu_memory_utilization=0.2, kv_cache_gib=1)
    arguments = classifier_args("model", "float32", generator, max_tokens=10_000, device=device)
    accepted = AsyncEngineArgs(**arguments)
    assert {name: getattr(accepted, name) for name in arguments} == arguments


def test_a_scorer_without_calls_leaves_the_cores_to_others():
    """A worker takes a core for this long after each call, also if the call only proves that it lives."""
    busy_s = inspect.signature(SpinCondition).parameters["busy_loop_s"].default
    assert 0 < 10 * busy_s <= PROBE_S


def test_vllm_starts_its_processes_as_the_environment_says(monkeypatch):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    set_environment(GeneratorConfig(), device="cuda")
    assert get_mp_context().get_start_method() == "spawn"


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_LOGGING_LEVEL",
        "VLLM_NO_USAGE_STATS",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
        "VLLM_CPU_OMP_THREADS_BIND",
    ],
)
def test_vllm_reads_these_variables(name):
    assert name in vllm.envs.environment_variables


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (AsyncLLM.pause_generation, ["self", "mode", "clear_cache"]),
        (AsyncMPClient.pause_scheduler_async, ["self", "mode", "clear_cache"]),
        (AsyncLLM.resume_generation, ["self"]),
        (AsyncLLM.is_paused, ["self"]),
        (AsyncLLM.collective_rpc, ["self", "method", "timeout", "args", "kwargs"]),
        (Worker.get_model, ["self"]),
        (set_current_vllm_config, ["vllm_config"]),
        (AsyncLLM.update_weight_version, ["self", "new_version"]),
        (layerwise.initialize_layerwise_reload, ["model"]),
        (layerwise.finalize_layerwise_processing, ["model", "model_config"]),
        (layerwise._place_kernel_tensors, ["layer", "info"]),
        (layerwise.get_layerwise_info, ["layer"]),
        (layerwise._copy_and_restore_kernel_tensors, ["layer", "info"]),
        (layerwise._get_original_loader, ["tensor"]),
        (meta.restore_layer_on_meta, ["layer", "info"]),
        (meta.materialize_layer, ["layer", "info"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_these_functions_take_what_we_give_them(function, expected):
    assert parameters_of(function)[: len(expected)] == expected


def test_vllms_worker_has_what_the_loader_reads_and_nothing_of_its_name():
    """vLLM refuses an extension with an attribute that its worker has, too."""
    assert not [name for name in vars(VersionLoader) if name[:2] != "__" and hasattr(Worker, name)]
    assert "self.vllm_config = " in inspect.getsource(WorkerBase.__init__)
    assert "self.device = " in inspect.getsource(Worker.init_device)


def test_objects_have_the_fields_that_we_read():
    info = layerwise.LayerReloadingInfo(restore_metadata=({}, {}), restore_device=None)
    assert callable(info.can_load)
    assert callable(info.reset)
    assert "request_states" in inspect.getsource(OutputProcessor.__init__)
