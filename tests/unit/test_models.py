"""Models that the learner would train wrong are refused by name, and the others compute what transformers computes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.preflight.architectures import REFUSED, architecture_problems
from asyncrl.trainer.loading import load_model
from asyncrl.trainer.miniature import AGREES, require_agreement
from asyncrl.trainer.policy import PolicyModule, packed_logprobs, plain_logprobs
from tests.support.architectures import NAMES, rows
from tests.support.models import tiny_qwen2

CPU = torch.device("cpu")
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SEQUENCES = [list(range(3, 3 + length)) for length in (9, 17, 30)]
DROPOUTS = {
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "layerdrop": 0.5},
    "seed_oss": {"head_dim": 32, "num_key_value_heads": 1, "residual_dropout": 0.2, "attention_dropout": 0.2},
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
}
FACTORS = {"cohere": {"logit_scale": 0.25}, "granite": {"logits_scaling": 3.0}}


@pytest.mark.parametrize("name", [*DROPOUTS, *FACTORS])
def test_two_passes_are_equal_and_those_of_transformers(name: str, tmp_path: Path) -> None:
    more = {**DROPOUTS, **FACTORS}[name]
    tiny_qwen2(tmp_path)  # for its tokenizer
    config = AutoConfig.for_model(name, **SIZES, **more, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(tmp_path)
    policy = PolicyModule(load_model(ModelConfig(path=str(tmp_path), dtype="float32"), CPU))
    assert policy.training
    with torch.no_grad():
        first, second = (torch.cat(packed_logprobs(policy, SEQUENCES, CPU, chunk=7)) for _ in range(2))
        reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        logprobs = [reference(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in SEQUENCES]
    expected = torch.cat(
        [rows[torch.arange(len(ids) - 1), ids[1:]] for rows, ids in zip(logprobs, SEQUENCES, strict=True)]
    )
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1  # a model that does not care proves nothing


def test_a_plain_pass_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen2", **SIZES, num_key_value_heads=1, intermediate_size=64)
    tiny_qwen2(tmp_path)  # for its tokenizer
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = PolicyModule(load_model(ModelConfig(path=str(tmp_path), dtype="float32"), CPU))
    attention = policy.model.config._attn_implementation
    with torch.no_grad():
        long = list(range(64)) * 2  # more tokens than are compared
        plain = plain_logprobs(policy.model, long, CPU)
        packed = packed_logprobs(policy, [long], CPU, chunk=50)[0]
    assert (policy.training, policy.model.config._attn_implementation) == (True, attention)
    torch.testing.assert_close(plain, packed[-len(plain) :], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "falcon"])
def test_the_layer_that_differs_is_named(name: str) -> None:
    more = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} if name == "lfm2" else {}
    found = {
        "lfm2": r"layers\.0\.conv \(Lfm2ShortConv\)",
        "qwen3_5_text": "GatedDeltaNet",
        "mamba": "MambaMixer",
    }
    with pytest.raises(ConfigError, match=found.get(name, f"the code of {name} does not run")):
        require_agreement(AutoConfig.for_model(name, **more))


def test_a_config_is_judged_as_it_is_and_stays_as_it_was() -> None:
    config = AutoConfig.for_model("mistral", sliding_window=16)  # shorter than the sequences
    before = config.to_dict()
    state = torch.random.get_rng_state()
    with pytest.raises(ConfigError, match="sliding_window 16 on 50 tokens"):
        require_agreement(config)
    config.sliding_window = None
    assert require_agreement(config) < AGREES
    assert config.to_dict() == before | {"sliding_window": None}
    assert torch.equal(torch.random.get_rng_state(), state)  # the run's own random numbers


def test_names_are_known_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    code = (
        "import sys; from asyncrl.config.sections import ModelConfig; "
        "from asyncrl.preflight.architectures import architecture_problems as problems; "
        "print(*problems(ModelConfig(path=sys.argv[1])), 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code, tmp_path], check=True, capture_output=True, text=True)
    assert "qwen3_next, which the learner cannot train" in said.stdout
    assert said.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, True),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"]}, False),
        (
            {"model_type": "gemma3", "text_config": {"layer_types": ["sliding_attention", "full_attention"]}},
            False,
        ),
        ({"model_type": "new", "text_config": {"layer_types": ["linear_attention", "full_attention"]}}, True),
        ({"model_type": "llama", "layer_types": 3}, False),
        ({"model_type": "llama", "text_config": None}, False),
        ({}, False),
        ([], False),
    ],
)
def test_layer_types_tell_too(config: object, is_refused: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert bool([*architecture_problems(ModelConfig(path=str(tmp_path)))]) is is_refused


def test_names_and_the_table_of_the_documentation_agree() -> None:
    table = rows()
    assert set(table) == set(NAMES)
    assert len(table) >= 40
    for name, row in table.items():
        # A config can switch off what these are refused for.
        depends = name in ("gemma2", "granitemoehybrid", "nanochat", "vaultgemma")
        assert (name in REFUSED) is (row["verdict"] == "refused" and not depends), name
