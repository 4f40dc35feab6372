"""`generator.vllm`: what would break a promise is refused with the reason, and a misspelt name is noticed."""

import subprocess
import sys
import tempfile
from glob import glob
from pathlib import Path

import pytest

from asyncrl.config import vllm_settings
from asyncrl.config.load import load_config
from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.config.vllm_settings import REFUSED, known_settings, quantisation
from asyncrl.engine.vllm.args import engine_args
from asyncrl.engine.vllm.classifier import classifier_args
from asyncrl.errors import ConfigError

RUN = "run: {name: x}\nmodel: {path: m}\ndata: {train: t}\nreward: {functions: [{function: exact_match}]}\n"


@pytest.fixture
def config(tmp_path):
    def load(text, *overrides):
        path = tmp_path / "run.yaml"
        path.write_text(f"{RUN}generator:\n  vllm: {text}\n")
        return load_config(path, overrides).generator.vllm

    return load


@pytest.fixture(autouse=True)
def vllm_with_three_arguments(monkeypatch):
    monkeypatch.setattr(
        vllm_settings,
        "known_settings",
        lambda: frozenset({"quantization", "block_size", "speculative_config", *REFUSED}),
    )


def test_settings_are_kept_as_they_are_written_also_on_the_command_line(config):
    nested = {"quantization": "fp8", "block_size": 16}
    assert config("{quantization: fp8}", "generator.vllm.block_size=16") == nested


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"block_size": 16, "quantization": None, "kv_cache_dtype": "auto"}, ""),
        ({"kv_cache_dtype": "bfloat16"}, ""),
        ({"quantization": "fp8"}, "quantization: fp8"),
        ({"kv_cache_dtype": "fp8", "quantization": "fp8"}, "quantization: fp8, kv_cache_dtype: fp8"),
    ],
)
def test_what_makes_an_engine_compute_with_fewer_bits_is_named_as_it_is_written(settings, said):
    assert quantisation(GeneratorConfig(vllm=settings), "bfloat16") == said


def test_half_of_the_bits_of_a_model_in_float32_are_fewer():
    halved = GeneratorConfig(vllm={"kv_cache_dtype": "bfloat16"})
    assert quantisation(halved, "float32") == "kv_cache_dtype: bfloat16"


@pytest.mark.parametrize("name", REFUSED)
def test_what_asyncrl_sets_or_promises_is_refused_with_the_reason(config, name):
    with pytest.raises(ConfigError) as error:
        config(f"{{{name}: 1}}")
    assert f":6  generator.vllm.{name}: is refused: {REFUSED[name]}" in str(error.value)


def test_every_mistake_is_shown_and_a_similar_name_is_offered_but_no_refused_one(config):
    with pytest.raises(ConfigError) as error:
        config("{quantisation: fp8, modle: m, nonsense: 1}")
    assert (
        "generator.vllm.quantisation: is no argument of the installed vLLM; did you mean `quantization`?"
        in (text := str(error.value))
    )
    assert "`model`" not in text
    assert "generator.vllm.nonsense: is no argument of the installed vLLM; docs.vllm.ai lists them" in text


def test_without_vllm_names_are_left_to_the_host_that_has_it_and_refusals_stay(config, monkeypatch):
    monkeypatch.setattr(vllm_settings, "known_settings", lambda: None)
    assert config("{quantisation: fp8}") == {"quantisation": "fp8"}
    with pytest.raises(ConfigError, match="is refused"):
        config("{dtype: float16}")


def test_engines_draw_other_numbers_unless_they_are_given_a_seed():
    def seed(**settings: int) -> int:
        generator = GeneratorConfig(vllm=settings)
        return engine_args(ModelConfig(path="m"), generator, SamplingConfig(), WeightsConfig(), device="cpu")[
            "seed"
        ]

    assert seed() != seed() and seed(seed=0) == 0


@pytest.mark.parametrize("name", ["owner/name", "./model", "[v2]/model", "model*"])
def test_vllm_takes_no_path_of_a_model_for_a_pattern(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "model.safetensors").touch()
    sections = GeneratorConfig(), SamplingConfig(), WeightsConfig()
    for given in (
        engine_args(ModelConfig(path=name), *sections, device="cpu"),
        classifier_args(name, "float32", GeneratorConfig(), max_tokens=8, device="cpu"),
    ):
        (found,) = glob(f"{given['model']}/*.safetensors")
        assert Path(found).samefile(tmp_path / name / "model.safetensors")
        assert (given["model"] == name) == (name in ("owner/name", "./model"))


def test_speculative_decoding_is_refused_with_min_p_which_vllm_cannot_do_then(config):
    settings = "{quantization: null, speculative_config: {method: ngram, num_speculative_tokens: 4}}"
    with pytest.raises(
        ConfigError, match=r"sampling.min_p: is set, .*generator.vllm.speculative_config; drop one"
    ):
        config(settings, "sampling.min_p=0.05", "sampling.top_k=20")
    assert "speculative_config" in config(settings)


@pytest.mark.parametrize("setting", ["tensor_parallel: 2", "recompute_kv: true", "vllm: {quantization: fp8}"])
def test_what_only_vllm_can_do_is_refused_for_another_engine(tmp_path, setting):
    (path := tmp_path / "run.yaml").write_text(f"{RUN}generator:\n  engine: transformers\n  {setting}\n")
    with pytest.raises(
        ConfigError, match=f"{setting.split(':')[0]}: is .*, which only generator.engine: vllm can do"
    ):
        load_config(path)
    path.write_text(path.read_text().replace("engine: transformers", "engine: vllm"))
    load_config(path)


def test_the_arguments_are_read_from_the_source_of_vllm(tmp_path, monkeypatch):
    source = tmp_path / "vllm" / "engine" / "arg_utils.py"
    source.parent.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    source.write_text(
        "class EngineArgs:\n    a: int = 1\n    _own: int = 2\n    shared: ClassVar[int] = 3\n    plain = 4\n"
        "class AsyncEngineArgs(EngineArgs):\n    b: str = ''\nclass Other:\n    c: int = 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert known_settings.__wrapped__() == {"a", "b"}
    source.unlink()
    assert known_settings.__wrapped__() is None


def test_a_config_with_settings_is_checked_without_importing_vllm_or_torch(tmp_path):
    path = Path(tmp_path, "run.yaml")
    path.write_text(f"{RUN}generator: {{vllm: {{quantization: fp8}}}}\n")
    check = (
        "import sys, pathlib; from asyncrl.config.load import load_config; "
        "load_config(pathlib.Path(sys.argv[1])); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm')))"
    )
    done = subprocess.run([sys.executable, "-c", check, str(path)], timeout=120, check=False)
    assert done.returncode == 0
