"""The adapter of a model: PEFT's own is the oracle."""

import json

import pytest
import torch
from peft import LoraConfig as PeftSettings
from peft import get_peft_model

from asyncrl import lora
from asyncrl.config.load import load
from asyncrl.config.sections import LearnerConfig, LoraConfig, ModelConfig
from asyncrl.errors import ConfigError, MissingLibrary
from asyncrl.hosting.machine import read_model
from asyncrl.hosting.memory_use import Rank, weights_bytes
from asyncrl.preflight import outside
from asyncrl.preflight.validate import validated_config
from asyncrl.stages.settings import StageConfig
from asyncrl.stages.with_trl import _model
from tests.support.models import model_of, peft_adapter, tiny_moe, tiny_qwen2
from tests.support.stages import tiny_stage

IDS = torch.arange(2, 30)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_the_adapter_of_peft_is_ours_under_the_same_names_and_its_merge_too(base, tmp_path):
    theirs = peft_adapter(base, tmp_path)
    config = LoraConfig(rank=8, alpha=16, targets=("up_proj", "q_proj"), start=tmp_path)
    lora.require_usable(config, str(base))
    model, plain = model_of(base), model_of(base)
    lora.inject(model, config)
    assert type(model) is type(plain)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=0, atol=0)
    assert (logits(model) - logits(plain)).abs().max() > 0.1
    with lora.adapters_off(model):
        torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=0)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=0, atol=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapter = dict(lora.adapter_tensors(model))
    assert len(trained) == len(adapter) == 2 * 2 * 2
    state = dict(lora.merged(lora.base_parameters(model), adapter, config))
    merged = dict(theirs.merge_and_unload().named_parameters())
    assert state.keys() == merged.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)


def test_every_process_begins_with_the_same_adapter_on_all_linear_layers_and_changes_nothing(base):
    one, other = model_of(base), model_of(base)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    lora.inject(one, LoraConfig())
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(8)
    lora.inject(other, LoraConfig())
    pairs = list(zip(lora.adapter_tensors(one), lora.adapter_tensors(other), strict=True))
    assert len(pairs) == 2 * 7 * 2
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    torch.testing.assert_close(logits(one), logits(model_of(base)), rtol=0, atol=0)


def test_names_that_peft_takes_for_experts_get_no_adapter_though_dense_layers_have_them(tmp_path):
    """PEFT's own reading of the settings is the oracle: it adapts the layers of ours, and no expert."""
    base = tiny_moe(tmp_path, mlp_only_layers=[0])
    model, theirs = model_of(base), model_of(base)
    lora.inject(model, LoraConfig())
    names = {name for name, _ in lora.adapter_tensors(model)}
    assert {name.split(".")[-3] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    settings = lora.peft_config(LoraConfig(), ModelConfig(path=""), {name.split(".")[-3] for name in names})
    found = get_peft_model(theirs, PeftSettings(**settings))
    assert names == {name for name, _ in lora.adapter_tensors(found.base_model.model)}
    for targets in (("up_proj",), ("gate_proj", "up_proj", "down_proj")):
        with pytest.raises(
            ConfigError, match=r"is model.*_proj, which PEFT takes for .*allowed are k_proj, "
        ):
            lora.inject(model_of(base), LoraConfig(targets=targets))


def test_a_stage_adapts_the_layers_that_a_run_adapts(tmp_path):
    """So a run can begin with the stage's adapter; "all-linear" of PEFT adapts other layers here."""
    base = tiny_moe(tmp_path / "model", mlp_only_layers=[0])
    run, stage = model_of(base), model_of(base)
    lora.inject(run, LoraConfig())
    options = {"lora": {"rank": 8}, "revision": "abc"}
    config = load(StageConfig, tiny_stage(tmp_path, "sft", model=options))
    adapted = get_peft_model(stage, _model(config, None)["peft_config"])
    found = adapted.base_model.model
    settings = lora.peft_config(config.model.lora, config.model, [])
    assert settings["revision"] == adapted.peft_config["default"].revision == "abc"
    assert [*dict(lora.adapter_tensors(found))] == [*dict(lora.adapter_tensors(run))]


def test_an_adapter_has_the_type_of_the_weights(base):
    model = model_of(base).bfloat16()
    lora.inject(model, LoraConfig())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("lm_head", "is lm_head, no linear"),
        ("embed_tokens", "is model.embed_tokens, no linear"),
        ("input_layernorm", "is model.layers.0.input_layernorm, no linear"),
        ("query", "names no layer"),
    ],
)
def test_a_target_that_is_no_layer_of_a_block_is_refused(base, target, found):
    with pytest.raises(ConfigError, match=rf"model.lora.targets: {target} {found}.*allowed are down_proj, "):
        lora.inject(model_of(base), LoraConfig(targets=("q_proj", target)))


@pytest.mark.parametrize(
    ("settings", "file", "match"),
    [
        ({"use_dora": True}, {}, "use_dora: True.*merge it"),
        ({"use_rslora": True}, {}, "use_rslora: True.*merge it"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save: .*merge it"),
        ({"bias": "all"}, {}, "bias: all.*merge it"),
        ({"rank_pattern": {"q_proj": 4}}, {}, "rank_pattern: .*merge it"),
        ({}, {"init_lora_weights": "pissa"}, "init_lora_weights: pissa.*merge it"),
        ({}, {"peft_type": "LOHA"}, "peft_type: LOHA.*merge it"),
        ({}, {"a_key_of_tomorrow": 3}, "a_key_of_tomorrow: 3.*merge it"),
        ({"r": 16}, {}, r"model.lora.rank: found 8, but .*adapter_config.json has r: 16; set model.lora.rank"),
        ({"lora_alpha": 8}, {}, r"model.lora.alpha: found 16.0, but .* lora_alpha: 8; set"),
        ({}, {"base_model_name_or_path": "other/model"}, "an adapter of other/model, but model.path is .*; set model.path"),
    ],
)  # fmt: skip
def test_another_kind_of_adapter_is_refused(base, tmp_path, settings, file, match):
    peft_adapter(base, tmp_path, **settings)
    place = tmp_path / "adapter_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | file))
    with pytest.raises(ConfigError, match=match):
        lora.require_usable(LoraConfig(rank=8, alpha=16, start=tmp_path), str(base))


def test_an_adapter_of_other_targets_is_refused(base, tmp_path):
    peft_adapter(base, tmp_path)
    with pytest.raises(
        ConfigError, match=r"model.lora.start: .*20 are missing, unknown.*set model.lora.targets"
    ):
        lora.inject(model_of(base), LoraConfig(rank=8, alpha=16, start=tmp_path))


def test_files_that_are_missing_or_broken_are_named(base, tmp_path):
    config = LoraConfig(rank=8, alpha=16, targets=("q_proj", "up_proj"), start=tmp_path)
    with pytest.raises(ConfigError, match=r"model.lora.start: .*adapter_config.json.*that PEFT has written"):
        lora.require_usable(config, str(base))
    peft_adapter(base, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"model.lora.start: .*adapter_model.safetensors: .*copy it again"):
        lora.inject(model_of(base), config)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_model.safetensors; save"):
        lora.require_usable(config, str(base))


def test_validate_names_what_is_wrong_with_an_adapter_and_where_it_is_set(base, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run: {{name: x}}\nmodel:\n  path: {base}\n  dtype: float32\n  lora: {{targets: [lm_head]}}\n"
        f"data: {{train: {tmp_path}/train.jsonl}}\nreward: {{functions: [{{function: exact_match}}]}}\n"
        "learner: {device: cpu}\nsampling: {max_prompt_tokens: 8, max_response_tokens: 8}\n"
    )
    with pytest.raises(ConfigError, match=r"run.yaml:5  model.lora.targets: lm_head is lm_head, no linear"):
        validated_config(path)
    with pytest.raises(ConfigError, match=r"model.lora.start: .*give a directory that PEFT"):
        validated_config(path, ["model.lora.targets=[]", f"model.lora.start={tmp_path}"])
    validated_config(path, ["model.lora.targets=[q_proj]"])


def test_a_base_in_4_bits_is_refused_where_it_cannot_be_kept(base, tmp_path, monkeypatch):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run: {{name: x}}\nmodel:\n  path: {base}\n  lora: {{load_in_4bit: true}}\n"
        f"data: {{train: {tmp_path}/train.jsonl}}\nreward: {{functions: [{{function: exact_match}}]}}\n"
        "sampling: {max_prompt_tokens: 8, max_response_tokens: 8}\n"
    )
    installed, on_transformers = {"bitsandbytes"}, ["generator.engine=transformers"]
    monkeypatch.setattr(outside, "find_spec", lambda name: name in installed or None)
    with pytest.raises(
        ConfigError, match=r"run.yaml:4.*engine is vllm, which keeps a base in 4 bits on GPUs"
    ):
        validated_config(path)
    monkeypatch.setattr(outside, "count_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"run: pip install vllm-bnb-plugin, or set generator.engine"):
        validated_config(path)
    assert validated_config(path, on_transformers).model.has_4bit_base
    installed.clear()
    with pytest.raises(ConfigError, match=r"run.yaml:4 .*pip install 'asyncrl\[bitsandbytes\]'"):
        validated_config(path, on_transformers)
    installed.add("bitsandbytes")
    experts = tiny_moe(tmp_path / "experts")
    with pytest.raises(ConfigError, match=r"model.lora.load_in_4bit: Qwen3MoeForCausalLM has experts"):
        validated_config(path, [*on_transformers, f"model.path={experts}"])


def test_a_base_without_bits_is_loaded_as_ever_and_a_missing_library_is_named(base):
    assert lora.base_arguments(ModelConfig(path=str(base), lora=LoraConfig()), "cpu") == {}
    with pytest.raises(MissingLibrary, match=r"pip install 'asyncrl\[bitsandbytes\]'"):
        lora.base_arguments(ModelConfig(path=str(base), lora=LoraConfig(load_in_4bit=True)), "cpu")


def test_layers_of_bitsandbytes_neither_round_their_scales_nor_save_them(base):
    """Stand-ins for its layers, whose own code does both."""
    model = model_of(base)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.support_avx512bf16_for_cpu = True
            module._save_to_state_dict = lambda found, prefix, keep: found.update({f"{prefix}scales": 1})
    lora.inject(model, LoraConfig())
    found = [vars(one) for one in model.modules() if hasattr(one, "support_avx512bf16_for_cpu")]
    assert found and not any(one["support_avx512bf16_for_cpu"] for one in found)
    names = {name for name, _ in model.named_parameters()}
    assert model.state_dict().keys() == names | {"lm_head.weight"}


def test_the_numbers_of_an_adapter_are_counted_without_weights(base):
    _, shape = read_model(ModelConfig(path=str(base), lora=LoraConfig(rank=8)))
    model = model_of(base)
    assert shape.parameters == sum(one.numel() for one in model.parameters())
    lora.inject(model, LoraConfig(rank=8))
    assert shape.adapter == sum(one.numel() for _, one in lora.adapter_tensors(model)) > 0
    assert shape.in_4bit == 0


def test_a_base_in_4_bits_is_counted_so(base):
    bits = ModelConfig(path=str(base), lora=LoraConfig(load_in_4bit=True))
    _, shape = read_model(bits)
    layers = [one for name, one in model_of(base).named_parameters() if "_proj.weight" in name]
    assert shape.in_4bit == sum(one.numel() for one in layers) > 0
    # 4 bits, a byte for 64 of them, and 4 bytes for 256 of these.
    whole, in_4bit = shape.parameters - shape.in_4bit, shape.in_4bit / 2 * (1 + 1 / 32 + 1 / 2048)
    assert weights_bytes(shape, bits) == pytest.approx(2 * whole + in_4bit, abs=1)
    rank = Rank(shape, bits, LearnerConfig())
    assert rank.weights == weights_bytes(shape, bits) + 2 * shape.adapter
