"""Model directories as downloads and other tools leave them: each fault is named with its file and a way out."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config import model_files as module
from asyncrl.config.load import load_config
from asyncrl.config.model_files import KINDS, ends_no_response, model_problems, require_loadable
from asyncrl.config.named_files import file_problems
from asyncrl.config.sections import LoraConfig, ModelConfig
from asyncrl.data.image_processor import ImageProcessor
from asyncrl.data.prompts import stop_ids, vocabulary_size
from asyncrl.errors import ConfigError, DataError
from asyncrl.hosting.machine import read_model
from asyncrl.launch.roles import NOT_FIXED_BY_A_RESTART
from asyncrl.lora import adapter_plan
from asyncrl.preflight.architectures import architecture_problems
from asyncrl.preflight.validate import validated_config
from asyncrl.trainer.loading import load_model
from tests.support.model_faults import FAULTS, WEIGHTS, change, cut, sharded, write
from tests.support.model_files import TENSORS, model_files
from tests.support.models import tiny_qwen2
from tests.support.stages import write_rows
from tests.support.task_config import config_of


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_with_its_file_and_a_way_out(tmp_path: Path, fault: str) -> None:
    directory = model_files(tmp_path / "model")
    assert model_problems(directory, remote_code=False) == []
    damage, said = FAULTS[fault]
    damage(directory)
    (problem,) = model_problems(directory, remote_code=False)
    assert str(directory) in problem and "; " in problem, "the place, and what to do"
    assert all(words in problem for words in said), problem
    if "token" in fault or "unigram" in fault or fault == "damaged settings":
        require_loadable(str(directory), remote_code=False)  # the weights can be loaded
        return
    with pytest.raises(DataError, match=r"^model\.path: "):
        require_loadable(str(directory), remote_code=False)


def test_what_is_whole_passes(tmp_path: Path) -> None:
    directory = model_files(tmp_path / "model")
    sharded(directory)
    assert model_problems(directory, remote_code=False) == []
    change(directory, "config.json", model_type="zzz")
    assert model_problems(directory, remote_code=True) == []
    # A vision model: its text part has the sizes.
    change(
        directory,
        "config.json",
        model_type="qwen2",
        vocab_size=None,
        text_config={"vocab_size": 8, "eos_token_id": 1},
    )
    assert model_problems(directory, remote_code=False) == []
    require_loadable("owner/name", remote_code=False)


def test_a_header_that_begins_like_text_is_weights(tmp_path: Path) -> None:
    """The first byte of a file is the length of its header, which may be that of `<` or `G`."""
    directory = model_files(tmp_path / "model")
    for first in {beginning[0] for beginning in KINDS} | {ord("G"), ord(" ")}:
        data = (directory / WEIGHTS).read_bytes()
        text, zeros = data[8 : -sum(4 * a * b for a, b in TENSORS.values())], data[-192:]
        text = text.rstrip() + b" " * ((first - len(text.rstrip())) % 256)
        (directory / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + zeros)
        assert load_file(directory / WEIGHTS).keys() == TENSORS.keys()
        assert model_problems(directory, remote_code=False) == [], first


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"eos_token_id": 0}'),
        ("generation_config.json", '{"eos_token_id": [3, 4]}'),
        ("tokenizer_config.json", '{"eos_token": {"content": "<eos>"}}'),
        ("special_tokens_map.json", '{"eos_token": "<eos>"}'),
    ],
)
def test_an_end_token_is_found_wherever_it_is_named(tmp_path: Path, name: str, text: str) -> None:
    directory = model_files(tmp_path / "model", eos_token_id=None)
    assert ends_no_response(directory)
    (directory / name).write_text(text)
    assert not ends_no_response(directory)


def test_what_transformers_saves_passes_and_only_the_beginning_of_it_is_read(tmp_path, monkeypatch):
    directory, read = tiny_qwen2(tmp_path / "model"), []
    original = Path.open

    class Counted:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def read(self, size):
            read.append(size)
            return self.file.read(size)

        def seek(self, place):
            return self.file.seek(place)

    monkeypatch.setattr(Path, "open", lambda path, mode="r", **how: (
        Counted(original(path, mode, **how)) if path.suffix == ".safetensors" else original(path, mode, **how)
    ))  # fmt: skip
    assert model_problems(directory, remote_code=False) == [] and not ends_no_response(directory)
    assert 0 < sum(read) < (directory / WEIGHTS).stat().st_size / 10


def test_validate_names_a_fault_at_the_key_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = model_files(tmp_path / "model")
    cut(directory)
    change(directory, "config.json", model_type=None)
    Path("train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    Path("run.yaml").write_text(
        "run: {name: a}\nmodel: {path: ./model}\ndata: {train: train.jsonl}\n"
        "reward: {functions: [{function: exact_match}]}\n"
    )
    load_config(Path("run.yaml"))
    with pytest.raises(ConfigError) as caught:
        validated_config(Path("run.yaml"))
    head, line = str(caught.value).splitlines()
    assert head == "1 problem in run.yaml" and line.startswith("  run.yaml:2  model.path: ")
    assert "no model_type" in line and "; and " in line and "cut off" in line


def test_a_number_that_is_a_text_is_left_to_the_loading_of_the_model(tmp_path: Path) -> None:
    directory = tiny_qwen2(tmp_path / "model")
    change(directory, "tokenizer_config.json", chat_template="x")
    (tmp_path / "judge.jinja").write_text("good?")
    params = {"scorer": "one", "prompt": str(tmp_path / "judge.jinja")}
    config = config_of(
        model={"path": str(directory)},
        data={"train": str(write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b"}]))},
        reward={"functions": [{"function": "model_judge", "params": params}]},
        scorers={"one": {"model": str(directory)}},
    )
    for found in ("4096", 32.5, [2]):
        change(directory, "config.json", max_position_embeddings=found, num_attention_heads=found)
        assert not [*file_problems(config)], found
    (directory / "config.json").write_text("[" * 100_000)
    assert {one.keys for one in file_problems(config)} == {("model.path",)}
    assert not [*architecture_problems(config.model)]


@pytest.mark.parametrize("damage", [cut, write("pytorch_model.bin", b"\x80\x02}q\x00(")])
def test_a_learner_that_cannot_load_it_ends_without_a_restart(tmp_path: Path, damage) -> None:
    """DataError is the exit status 2, also for what only transformers finds."""
    directory = tiny_qwen2(tmp_path / "model")
    if damage is not cut:
        (directory / WEIGHTS).unlink()
    damage(directory)
    with pytest.raises(DataError, match=r"model\.path") as caught:
        load_model(ModelConfig(path=str(directory), dtype="float32"), torch.device("cpu"))
    assert isinstance(caught.value, NOT_FIXED_BY_A_RESTART)


@pytest.mark.parametrize("wrong", [{"layer_types": ["full_attention"]}, {"hidden_size": "64"}])
def test_a_config_that_only_transformers_refuses_is_an_error_of_the_model(tmp_path: Path, wrong) -> None:
    """Its classes of configs raise neither ValueError nor OSError."""
    directory = tiny_qwen2(tmp_path / "model")
    model = ModelConfig(path=str(directory), dtype="float32", lora=LoraConfig())
    change(directory, "generation_config.json", eos_token_id=5)
    change(directory, "config.json", **wrong)
    assert stop_ids(model) == [5], "loading the model says what is wrong"
    readers = (read_model, vocabulary_size, partial(adapter_plan, lora=model.lora))
    for read in (*readers, partial(load_model, device=torch.device("cpu"))):
        with pytest.raises(DataError, match=rf"model\.path {directory}: its config\.json cannot be read"):
            read(model)
    with pytest.raises(DataError, match=r"no processor of images .*config\.json"):
        ImageProcessor(model)


def test_the_types_that_transformers_knows_are_those_it_lists() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert set(CONFIG_MAPPING_NAMES) <= set(module._known_types())
