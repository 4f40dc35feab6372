"""A chat template of one's own: the same text for data, checks and exports, and bound to the run. What exports hold."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from asyncrl.config.data_section import DataConfig, EvalSet
from asyncrl.config.load import load_config
from asyncrl.config.outline import resume_findings
from asyncrl.config.resolved import config_hash, dump_config, eval_digest, host_digest
from asyncrl.config.schema import Config
from asyncrl.config.sections import ModelConfig, SamplingConfig
from asyncrl.data.prompts import PromptSource, light_renderer
from asyncrl.errors import ConfigError, DataError
from asyncrl.preflight.validate import validated_config
from asyncrl.trainer.loading import export_model, load_model
from tests.support.characters import CHARACTERS, SPECIALS, character_tokenizer
from tests.support.task_config import config_of

OWN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

TINY = Qwen2Config(
    vocab_size=len(SPECIALS + CHARACTERS), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=1, num_key_value_heads=1, eos_token_id=2,
)  # fmt: skip


@pytest.fixture
def task(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.jinja").write_text(OWN)
    Path("rows.jsonl").write_text(json.dumps({"prompt": "hi", "answer": "x"}) + "\n")
    character_tokenizer(tmp_path / "model", template="another: {{ messages[0].content }}")
    Qwen2ForCausalLM(TINY).save_pretrained("model")
    values = {
        "run": {"name": "r"},
        "model": {"path": "model", "chat_template": "own.jinja"},
        "data": {"train": "rows.jsonl"},
        "reward": {"functions": ["exact_match"]},
    }
    Path("run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def test_prompts_and_checks_render_with_it(task):
    model, data = load_config(Path("run.yaml")).model, DataConfig(train="rows.jsonl")
    # The file is read once: a run has the text, wherever its processes are.
    Path("own.jinja").unlink()
    prompts = PromptSource(data, model, SamplingConfig(), seed=0)
    expected = "<user>hi\n<assistant>"
    assert prompts.prompt(1).text == expected
    light = light_renderer(data, model)
    assert light is not None and light.chat([{"role": "user", "content": "hi"}], "here") == expected
    # Episodes and the endpoint render with this one.
    assert prompts.renderer.render([{"role": "user", "content": "hi"}], generation=True) == expected


def test_an_export_has_it(task):
    model = Qwen2ForCausalLM(TINY)
    for template, expected in ((OWN, OWN), (True, "another: {{ messages[0].content }}")):
        to = task / f"hf-{template is True}"
        export_model(model, ModelConfig(path="model", chat_template=template), model.state_dict(), to)
        assert AutoTokenizer.from_pretrained(to).chat_template == expected


def test_an_export_has_the_buffers_by_which_a_router_chooses(task):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "topk_group": 1, "vocab_size": 40}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, **experts, **heads, first_k_dense_replace=1)).eval()
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.tensor([3.0, -3.0, 2.0, -2.0]))
    trained = dict(model.named_parameters())
    export_model(model, ModelConfig(path="model"), trained, task / "hf")
    again, ids = Glm4MoeForCausalLM.from_pretrained(task / "hf").eval(), torch.arange(2, 12)[None]
    assert torch.equal(again.model.layers[1].mlp.gate.e_score_correction_bias, bias)
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"do_sample": False, "top_p": 0.9}, {}])
def test_a_model_whose_generation_config_transformers_would_not_write_is_exported(task, sampling):
    settings = Path("model/generation_config.json")
    settings.write_text(json.dumps({"eos_token_id": 2, **sampling}))
    model = load_model(ModelConfig(path="model", dtype="float32"), torch.device("cpu"))
    export_model(model, ModelConfig(path="model"), dict(model.named_parameters()), task / "hf")
    found = GenerationConfig.from_pretrained(task / "hf").to_diff_dict()
    assert {
        "eos_token_id": 2,
        **sampling,
        **({"do_sample": True} if sampling else {}),
    }.items() <= found.items()
    settings.write_text(json.dumps({"early_stopping": True, "length_penalty": 0.8}))
    with pytest.raises(DataError, match=r"(?s)cannot be loaded as a causal language model .*`num_beams`"):
        load_model(ModelConfig(path="model", dtype="float32"), torch.device("cpu"))


def test_a_config_with_it_comes_back_as_written_and_is_one_with_its_text(task):
    config = load_config(Path("run.yaml"))
    Path("again.yaml").write_text(dump_config(config))
    assert load_config(Path("again.yaml")) == config and config.model.chat_template == OWN
    inline = load_config(Path("run.yaml"), (f"model.chat_template={json.dumps(OWN)}",))
    other = config_of(**config.model_dump() | {"model": {"path": "model", "chat_template": OWN + "!"}})
    for of in (
        config_hash,
        host_digest,
        lambda one: eval_digest(one, EvalSet(path="held-out.jsonl")),
    ):
        assert of(config) == of(inline) != of(other)


def test_a_resume_with_another_text_is_refused_and_with_a_moved_file_not(task):
    config = load_config(Path("run.yaml"))
    Path("own.jinja").rename("moved.jinja")
    moved = load_config(Path("run.yaml"), ("model.chat_template=moved.jinja",))
    saved = config.fixed_values(rows="x")
    assert not list(resume_findings(Config, saved, moved.fixed_values(rows="x"), weights="w"))
    Path("moved.jinja").write_text(OWN.replace("<assistant>", "<model>"))
    changed = load_config(Path("run.yaml"), ("model.chat_template=moved.jinja",))
    (found,) = resume_findings(Config, saved, changed.fixed_values(rows="x"), weights="w")
    assert found.keys == ("model.chat_template",) and found.text.count("a template with digest ") == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{% for m in messages %}\nno end", r"model.chat_template.*not a template: Unexpected end .* in its line"),
        ("{% frobnicate %}", r"model.chat_template.*Encountered unknown tag 'frobnicate' in its line 1; correct"),
        (b"\xff{{ messages }}", r"model.chat_template.*found own.jinja; as a file it cannot be read \(it is not UTF-8\)"),
        (None, r"model.chat_template.*cannot be read \(No such file or directory\); allowed are true, false, a Jinja"),
    ],
)  # fmt: skip
def test_a_wrong_one_is_named_by_validate(task, content, message):
    file = Path("own.jinja")
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        validated_config(Path("run.yaml"))
    assert "1 problem" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{{ 1 }}\n{% frobnicate %}", r"model.chat_template: is true, but that of the .* in model .* in its line 2"),
        (b"{{ 1 }}\n\xff", r"model.chat_template: is true, but model/chat_template.jinja is not UTF-8 from byte 8 on"),
    ],
)  # fmt: skip
def test_a_wrong_one_of_the_model_is_named_by_validate(task, content, message):
    Path("model/chat_template.jinja").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        validated_config(Path("run.yaml"), ("model.chat_template=true",))
    assert "1 problem" in str(caught.value)


def test_a_generator_refuses_a_wrong_one(task):
    model = ModelConfig(path="model", chat_template="{% if %}")
    with pytest.raises(DataError, match=r"model.chat_template is not a template: .* in its line 1"):
        PromptSource(DataConfig(train="rows.jsonl"), model, SamplingConfig(), seed=0)
