"""What a layer keeps for the backward pass, counted by torch on real models, and the learner's limit."""

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.sections import GeneratorConfig, LearnerConfig, ModelConfig
from asyncrl.engine.vllm.args import engine_args
from asyncrl.launch import generator_process
from asyncrl.launch.machine import Machine
from asyncrl.trainer.deepspeed import engine_settings
from asyncrl.trainer.deepspeed.attention import SEGMENTS
from asyncrl.trainer.deepspeed.memory_use import (
    BUCKET_NUMBERS,
    GATHERED_WEIGHTS,
    STEPPED_NUMBERS,
    ModelShape,
    activations_bytes,
    kept_bytes_per_token,
)
from asyncrl.trainer.deepspeed.policy import PolicyModule
from tests.support.sequence_ranks import OneRank
from tests.support.task_config import config_of

TOKENS, VOCABULARY = 256, 64
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1280,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": VOCABULARY,
}
SHAPE = ModelShape(
    parameters=1, layers=3, hidden=256, intermediate=1280, query=256, kv=128, vocabulary=VOCABULARY
)
GIB = 1 << 30


def kept_bytes(kind: str, dtype: torch.dtype, *, checkpointing: bool, ranks: int) -> int:
    """Bytes of all activations that autograd saves in a forward pass, in one of `ranks` that divide it; with
    checkpointing also the largest amount that the backward pass saves again at a time."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SIZES), dtype=dtype, attn_implementation=SEGMENTS
    ).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = PolicyModule(model, OneRank(0, ranks) if ranks > 1 else None)
    parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    ids = torch.arange(TOKENS) % VOCABULARY
    positions = torch.arange(TOKENS) % (TOKENS // 2)
    starts = [0, TOKENS // 2, TOKENS]
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        policy(ids, positions, starts, torch.arange(TOKENS - 1), ids[1:], 1.0, 64)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_activations_are_those_that_autograd_keeps(kind, dtype, checkpointing, ranks):
    model = ModelConfig(path="m", dtype=dtype)
    learner = LearnerConfig(
        ranks=ranks,
        sequence_parallel=ranks,
        tokens_per_microbatch=TOKENS,
        logprob_chunk_tokens=1,
        gradient_checkpointing=checkpointing,
    )
    predicted = activations_bytes(SHAPE, model, learner)
    counted = kept_bytes(kind, getattr(torch, dtype), checkpointing=checkpointing, ranks=ranks)
    if checkpointing:  # the backward pass recomputes one layer at a time
        predicted -= TOKENS // ranks * kept_bytes_per_token(SHAPE, model)
    assert predicted == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "query", "kv", "counted"),
    [
        (896, 4864, 896, 128, 59_200),  # Qwen2.5-0.5B
        (1536, 8960, 1536, 256, 106_552),  # Qwen2.5-1.5B
        (4096, 14336, 4096, 1024, 209_032),  # Llama-3.1-8B
    ],
)
def test_a_layer_of_real_models_in_bfloat16(hidden, intermediate, query, kv, counted):
    """Counted once by the same hooks on layers of these sizes, too large for a test."""
    shape = ModelShape(
        parameters=1, layers=1, hidden=hidden, intermediate=intermediate, query=query, kv=kv, vocabulary=1
    )
    assert kept_bytes_per_token(shape, ModelConfig(path="m")) == pytest.approx(counted, rel=0.01)


def test_a_learner_beside_generators_keeps_to_its_share(monkeypatch):
    limits = []
    total = type("Properties", (), {"total_memory": 80 * GIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append((share, device))
    )
    device = torch.device("cuda", 0)
    engine_settings.limit_memory(torch.device("cpu"), 0.5)
    engine_settings.limit_memory(device, 1.0)
    assert not limits
    engine_settings.limit_memory(device, 0.58)
    assert limits == [(pytest.approx(0.58 - 1 / 80), device)]


def test_an_engine_that_shares_its_gpu_is_told_its_cache_and_does_not_measure(monkeypatch):
    config, parameters = config_of(), 494_032_768
    shape = ModelShape(
        parameters=parameters, layers=24, hidden=896, intermediate=4864, query=896, kv=128, vocabulary=151_936
    )
    machine = Machine(memory_bytes=GIB, gpu_bytes=(80 * GIB,))
    monkeypatch.setattr(generator_process, "this_machine", lambda device: machine)
    monkeypatch.setattr(generator_process, "is_installed", lambda: True)
    monkeypatch.setattr(generator_process, "read_shape", lambda model: shape)

    def arguments(generator: GeneratorConfig) -> dict:
        return engine_args(config.model, generator, config.sampling, config.weights, device="cuda")

    shared = arguments(generator_process.allotted(config, 0.4, is_shared=True))
    left = int(0.4 * 80 * GIB) - 2 * parameters - 2 * GIB - 256 * 151_936 * 12
    assert shared["gpu_memory_utilization"] == 0.4
    assert shared["kv_cache_memory_bytes"] == pytest.approx(left, abs=1024)
    alone = arguments(generator_process.allotted(config, 0.85, is_shared=False))
    assert alone["gpu_memory_utilization"] == 0.85 and "kv_cache_memory_bytes" not in alone
    on_cpu = generator_process.allotted(config, None, is_shared=False)
    assert engine_args(
        config.model, on_cpu, config.sampling, config.weights, device="cpu"
    )["kv_cache_memory_bytes"] == GIB  # fmt: skip


def test_deepspeed_gets_the_sizes_of_buffers_that_plan_counts():
    for numbers in (12, BUCKET_NUMBERS + 1):
        module = torch.nn.Linear(numbers, 1, bias=False, device="meta")
        settings = engine_settings.engine_settings(module, dtype="bfloat16", stage=3)["zero_optimization"]
        zero = DeepSpeedZeroConfig(**settings)
        assert zero.reduce_bucket_size == min(numbers, BUCKET_NUMBERS)
        assert zero.max_live_parameters == zero.max_reuse_distance == GATHERED_WEIGHTS
        assert zero.sub_group_size == STEPPED_NUMBERS
