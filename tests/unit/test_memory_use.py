"""What a layer keeps for the backward pass, counted by torch on real models, and the learner's limit."""

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from asyncrl.builds import CPU
from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.config.sections import GeneratorConfig, LearnerConfig, ModelConfig
from asyncrl.engine.base import Device
from asyncrl.engine.vllm import args
from asyncrl.engine.vllm.args import engine_args
from asyncrl.engine.vllm.classifier import classifier_args
from asyncrl.errors import ConfigError
from asyncrl.hosting.machine import Machine, read_model
from asyncrl.hosting.memory_use import (
    BUCKET_NUMBERS,
    GATHERED_WEIGHTS,
    MOMENTS,
    STEPPED_NUMBERS,
    ModelShape,
    Rank,
    kept_bytes_per_token,
)
from asyncrl.launch import generator_process
from asyncrl.lora import inject
from asyncrl.preflight.fit import read_trained_shape
from asyncrl.preflight.forecast import estimates, forecast
from asyncrl.trainer.attention import SEGMENTS
from asyncrl.trainer.deepspeed import engine_settings
from asyncrl.trainer.deepspeed.trained_model import make_optimizer
from asyncrl.trainer.device import limit_memory
from asyncrl.trainer.kept import Setting, counted, kept_per_token
from asyncrl.trainer.loading import recompute
from asyncrl.trainer.policy import PolicyModule
from tests.support.models import model_of, tiny_moe, tiny_qwen2
from tests.support.sequence_ranks import OneRank
from tests.support.task_config import config_of

TOKENS, VOCABULARY = 64, 64
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


EXPERTS = {"num_experts": 8, "moe_intermediate_size": 320, "shared_expert_intermediate_size": 640}
KINDS = {
    "qwen2": {},
    "llama": {},
    "mistral": {},
    "granite": {},
    "qwen3": {"head_dim": 64},  # norms of queries and keys
    "olmo2": {"eos_token_id": 1},  # norms after attention and MLP
    "gemma3_text": {"head_dim": 64, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": EXPERTS,
}  # fmt: skip


def config_of_kind(kind: str, **sizes: object) -> PretrainedConfig:
    return AutoConfig.for_model(kind, **SIZES | KINDS[kind] | sizes)


def kept_bytes(config: PretrainedConfig, setting: Setting, *, dtype: str = "bfloat16", ranks: int = 1) -> int:
    """Bytes of all activations that autograd saves in a forward pass, in one of `ranks` that divide it."""
    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation=SEGMENTS
    ).train()
    recompute(model, setting)
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
        policy(
            input_ids_N=ids,
            position_ids_N=positions,
            sequence_starts=starts,
            source_T=torch.arange(TOKENS - 1),
            target_T=ids[1:],
            temperature=1.0,
            chunk=64,
        )
    return sum(storage.nbytes() for storage in saved.values())


def forecast_of(
    directory: Path, config: PretrainedConfig, setting: Setting, *, dtype: str = "bfloat16", ranks: int = 1
) -> int:
    """Bytes of activations that `asyncrl plan` computes for the model of a config.json."""
    config.save_pretrained(directory)
    model = ModelConfig(path=str(directory), dtype=dtype)
    learner = LearnerConfig(
        ranks=ranks,
        sequence_parallel=ranks,
        tokens_per_microbatch=TOKENS,
        logprob_chunk_tokens=1,
        gradient_checkpointing=setting,
    )
    shape = read_trained_shape(model, learner)
    assert not shape.uncounted
    return Rank(shape, model, learner).activations


@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_those_that_autograd_keeps(kind, tmp_path):
    config = config_of_kind(kind)
    assert forecast_of(tmp_path, config, False) == pytest.approx(kept_bytes(config, False), rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_activations_of_each_dtype_and_of_ranks_that_divide_sequences(dtype, ranks, tmp_path):
    config = config_of_kind("qwen3")
    predicted = forecast_of(tmp_path, config, False, dtype=dtype, ranks=ranks)
    assert predicted == pytest.approx(kept_bytes(config, False, dtype=dtype, ranks=ranks), rel=0.1)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2_moe"])
def test_what_is_recomputed_is_kept_for_one_layer_or_one_mlp_at_a_time(kind, tmp_path):
    config = config_of_kind(kind)
    whole, selective, inputs = (kept_bytes(config, setting) for setting in (False, "selective", True))
    layer = whole - kept_bytes(config_of_kind(kind, num_hidden_layers=2), False)
    predicted = forecast_of(tmp_path, config, True)
    assert predicted == pytest.approx(inputs + layer, rel=0.1)
    predicted = forecast_of(tmp_path, config, "selective")
    assert predicted == pytest.approx(selective + (whole - selective) / 3, rel=0.1)


@pytest.mark.parametrize("setting", [False, True])
def test_layers_of_different_kinds_are_added_up_and_the_largest_is_recomputed(setting, tmp_path):
    dense, mixed = (
        config_of_kind("qwen2_moe", mlp_only_layers=layers, shared_expert_intermediate_size=1280)
        for layers in ([0, 1, 2], [0])
    )
    assert kept_bytes(mixed, False) > 1.2 * kept_bytes(dense, False)
    predicted, counted = forecast_of(tmp_path, mixed, setting), kept_bytes(mixed, setting)
    if setting:  # the last layer is one with experts
        two = config_of_kind(
            "qwen2_moe", mlp_only_layers=[0], shared_expert_intermediate_size=1280, num_hidden_layers=2
        )
        counted += kept_bytes(mixed, False) - kept_bytes(two, False)
    assert predicted == pytest.approx(counted, rel=0.1)


def test_counting_leaves_the_models_own_config_alone():
    config = config_of_kind("qwen2")
    config._attn_implementation = SEGMENTS
    before, state = config.to_dict(), torch.get_rng_state()
    assert counted(SHAPE, config, ModelConfig(path="m"), True).kept_per_token
    assert config.to_dict() == before and config._attn_implementation == SEGMENTS
    assert torch.equal(torch.get_rng_state(), state)


def test_an_architecture_that_cannot_be_counted_is_estimated_and_plan_says_so():
    """OPT computes positions from data, which the meta device lacks."""
    config = AutoConfig.for_model("opt", hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    model, learner = ModelConfig(path="m"), LearnerConfig()
    shape = counted(SHAPE, config, model, False)
    assert shape.kept_per_token is None and "meta" in shape.uncounted
    assert Rank(shape, model, learner).activations == Rank(SHAPE, model, learner).activations
    (doubt,) = estimates(shape)
    assert "the activations of this architecture are estimated" in doubt and shape.uncounted in doubt
    machine = Machine(memory_bytes=500 * GIB, gpu_bytes=(80 * GIB, 80 * GIB))
    assert doubt in forecast(config_of(), shape, machine, rows=None).warnings
    assert not list(estimates(SHAPE))


def test_a_model_that_the_learner_would_refuse_is_refused_before_it_is_counted():
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        config = AutoConfig.for_model("gemma2", **SIZES, final_logit_softcapping=30.0)
        counted(SHAPE, config, ModelConfig(path="m"), False)
    with pytest.raises(ConfigError, match="selective recomputes the module `mlp`"):
        config = AutoConfig.for_model("granitemoeshared", **SIZES)
        counted(SHAPE, config, ModelConfig(path="m"), "selective")


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("setting", [False, True])
def test_the_estimate_is_that_of_llama(kind, dtype, setting):
    model = ModelConfig(path="m", dtype=dtype)
    learner = LearnerConfig(
        tokens_per_microbatch=TOKENS, logprob_chunk_tokens=1, gradient_checkpointing=setting
    )
    predicted = Rank(SHAPE, model, learner).activations
    if setting:  # the backward pass recomputes one layer at a time
        predicted -= TOKENS * kept_bytes_per_token(SHAPE, model)
    found = kept_bytes(config_of_kind(kind), setting, dtype=dtype)
    assert predicted == pytest.approx(found, rel=0.1)


REAL = {
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 14, 2, {}),
    "Qwen2.5-1.5B": ("qwen2", 1536, 8960, 12, 2, {}),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 8, {}),
    "Qwen3-0.6B": ("qwen3", 1024, 3072, 16, 8, {"head_dim": 128}),
    "Qwen3-4B": ("qwen3", 2560, 9728, 32, 8, {"head_dim": 128}),
    "Qwen3-30B-A3B": ("qwen3_moe", 2048, 6144, 32, 4, {"head_dim": 128, "moe_intermediate_size": 768}),
}


@pytest.mark.parametrize("name", REAL)
def test_the_page_has_what_a_layer_of_real_models_keeps(name):
    kind, hidden, intermediate, heads, kv_heads, more = REAL[name]

    def kept(layers: int, setting: Setting) -> int:
        config = AutoConfig.for_model(
            kind,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            num_hidden_layers=layers,
            vocab_size=100,
            **more,
        )
        return kept_per_token(config, ModelConfig(path="m", dtype="bfloat16"), setting)

    whole, selective, inputs = (
        (kept(2, setting) - kept(1, setting)) / 1000 for setting in (False, "selective", True)
    )
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    assert f"| {name} | {whole:.0f} kB | {selective:.0f} kB | {inputs:.1f} kB |" in page


@pytest.mark.parametrize(
    ("hidden", "intermediate", "query", "kv", "counted"),
    [
        (896, 4864, 896, 128, 59_200),  # Qwen2.5-0.5B
        (1536, 8960, 1536, 256, 106_552),  # Qwen2.5-1.5B
        (4096, 14336, 4096, 1024, 209_032),  # Llama-3.1-8B
    ],
)
def test_the_estimate_of_a_layer_of_real_models_in_bfloat16(hidden, intermediate, query, kv, counted):
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
    limit_memory(torch.device("cpu"), 0.5)
    limit_memory(device, 1.0)
    assert not limits
    limit_memory(device, 0.58)
    assert limits == [(pytest.approx(0.58 - 1 / 80), device)]


def test_an_engine_that_shares_its_gpu_is_told_its_cache_and_does_not_measure(monkeypatch):
    config, parameters = config_of(), 494_032_768
    shape = ModelShape(
        parameters=parameters, layers=24, hidden=896, intermediate=4864, query=896, kv=128, vocabulary=151_936
    )
    machine = Machine(memory_bytes=GIB, gpu_bytes=(80 * GIB,))
    monkeypatch.setattr(generator_process, "this_machine", lambda device: machine)
    monkeypatch.setattr(generator_process, "is_installed", lambda: True)
    monkeypatch.setattr(generator_process, "read_model", lambda model: (None, shape))

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


def test_a_classifier_gets_its_share_of_a_gpu(monkeypatch):
    def arguments(device: Device, **settings: float) -> dict:
        return classifier_args("m", "bfloat16", GeneratorConfig(**settings), max_tokens=8, device=device)

    made = arguments("cuda", gpu_memory_utilization=0.4, kv_cache_gib=2)
    assert made["gpu_memory_utilization"] == 0.4 and made["kv_cache_memory_bytes"] == 2 * GIB
    assert "kv_cache_memory_bytes" not in arguments("cuda", gpu_memory_utilization=0.4)
    monkeypatch.setattr(args, "build_of", lambda package: "13.0")
    assert arguments("cpu")["gpu_memory_utilization"] == args.SMALL_SHARE, "a vLLM for GPUs"
    monkeypatch.setattr(args, "build_of", lambda package: CPU)
    assert "gpu_memory_utilization" not in arguments("cpu") and arguments("cpu")["enforce_eager"]


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_moe])
@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_muon_keeps_a_moment_of_matrices_and_adamw_two_of_the_rest(tmp_path, make, lora):
    config = ModelConfig(path=str(make(tmp_path / "model")), lora=lora)
    model = model_of(config.path)
    if config.lora:
        inject(model, config.lora)
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = make_optimizer(OptimizerConfig(kind="muon"), model, trained)(trained).param_groups
    kept = sum(each.numel() * (4 if group["use_muon"] else 8) for group in groups for each in group["params"])
    # Scales of norms and biases are counted as matrices.
    assert MOMENTS["muon"][1](read_model(config)[1]) == pytest.approx(kept, rel=0.01)


def test_deepspeed_gets_the_sizes_of_buffers_that_plan_counts():
    for numbers in (12, BUCKET_NUMBERS + 1):
        module = torch.nn.Linear(numbers, 1, bias=False, device="meta")
        settings = engine_settings.engine_settings(module, dtype="bfloat16", stage=3)["zero_optimization"]
        zero = DeepSpeedZeroConfig(**settings)
        assert zero.reduce_bucket_size == min(numbers, BUCKET_NUMBERS)
        assert zero.max_live_parameters == zero.max_reuse_distance == GATHERED_WEIGHTS
        assert zero.sub_group_size == STEPPED_NUMBERS
