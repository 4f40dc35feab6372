"""Model directories as downloads and other tools leave them: each fault is named with its file and a way out."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config import model_files as module
from asyncrl.config.load import load_config
from asyncrl.config.model_files import KINDS, ends_no_response, model_problems, require_loadable
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch.roles import NOT_FIXED_BY_A_RESTART
from asyncrl.preflight.validate import validated_config
from asyncrl.trainer.loading import load_model
from tests.support.model_files import TENSORS, model_files, safetensors
from tests.support.models import tiny_qwen2

POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\n"
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def sharded(directory: Path) -> None:
    """Divide the weights into two shards with an index."""
    (directory / WEIGHTS).unlink()
    for shard, (name, shape) in zip(SHARDS, TENSORS.items(), strict=True):
        safetensors(directory / shard, {name: shape})
    placed = dict(zip(TENSORS, SHARDS, strict=True))
    (directory / INDEX).write_text(json.dumps({"weight_map": placed}))


def change(directory: Path, name: str, **values: object) -> None:
    """Set keys of a JSON file; None removes one."""
    found = json.loads((directory / name).read_text()) | values
    (directory / name).write_text(
        json.dumps({key: value for key, value in found.items() if value is not None})
    )


def cut(directory: Path, name: str = WEIGHTS, keep: int = -1) -> None:
    (directory / name).write_bytes((directory / name).read_bytes()[:keep])


def without_a_shard(directory: Path) -> None:
    sharded(directory)
    (directory / SHARDS[1]).unlink()


def without_the_index(directory: Path) -> None:
    sharded(directory)
    (directory / INDEX).unlink()


def with_a_foreign_shard(directory: Path) -> None:
    sharded(directory)
    safetensors(directory / SHARDS[1], {"other.weight": (4, 4)})


def with_a_cut_shard(directory: Path) -> None:
    sharded(directory)
    cut(directory, SHARDS[0])


def adapter(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / WEIGHTS).rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')


def gguf(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    (directory / "model-q4.gguf").write_bytes(b"GGUF\x03")


def dangling(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to("../../blobs/4d7a")


def damaged_header(directory: Path) -> None:
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data.replace(b"[8, 4]", b"[9, 4]"))


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def settings(**values: object) -> Callable[[Path], object]:
    return lambda directory: change(directory, "config.json", **values)


FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "pointer": (write(WEIGHTS, POINTER), (WEIGHTS, "git-LFS pointer", "git lfs pull")),
    "tokenizer pointer": (write("tokenizer.json", POINTER), ("tokenizer.json", "git lfs pull")),
    "config pointer": (write("config.json", POINTER), ("config.json", "git lfs pull")),
    "web page": (write(WEIGHTS, "<!DOCTYPE html><html>"), (WEIGHTS, "web page", "download the file itself")),
    "renamed GGUF": (write(WEIGHTS, b"GGUF\x03\x00"), (WEIGHTS, "GGUF", "safetensors format")),
    "empty weights": (write(WEIGHTS, ""), (WEIGHTS, "is empty", "download it again")),
    "cut off": (cut, (WEIGHTS, "381 bytes", "describes 382", "cut off")),
    "cut in the header": (lambda one: cut(one, keep=40), (WEIGHTS, "cut off or another file")),
    "longer": (lambda one: (one / WEIGHTS).open("ab").write(b"0"), (WEIGHTS, "damaged")),
    "damaged header": (damaged_header, (WEIGHTS, "damaged header", "embed_tokens")),
    "other bytes": (write(WEIGHTS, os.urandom(200)), (WEIGHTS, "no header", "download it again")),
    "missing shard": (without_a_shard, (INDEX, "2 files, of which 1 are missing", SHARDS[1], "copy")),
    "missing index": (without_the_index, (SHARDS[0], INDEX, "copy it too")),
    "foreign shard": (with_a_foreign_shard, (SHARDS[1], "lacks model.layers.0", "same model")),
    "cut shard": (with_a_cut_shard, (SHARDS[0], "cut off")),
    "index without a map": (
        lambda one: (sharded(one), (one / INDEX).write_text("{}")),
        (INDEX, "weight_map", "again"),
    ),
    "no weights": (lambda one: (one / WEIGHTS).unlink(), ("no weights", WEIGHTS, "download")),
    "dangling link": (dangling, (WEIGHTS, "link to ../../blobs/4d7a", "again")),
    "cut torch file": (
        lambda one: ((one / WEIGHTS).unlink(), (one / "pytorch_model.bin").write_bytes(b"PK\x03\x04" * 9)),
        ("pytorch_model.bin", "cut off", "again"),
    ),
    "adapter": (adapter, ("LoRA adapter", "merge it into Qwen/Qwen3-0.6B")),
    "GGUF directory": (gguf, ("model-q4.gguf", "original model")),
    "no config": (lambda one: (one / "config.json").unlink(), ("config.json", "No such file", "give")),
    "damaged config": (lambda one: cut(one, "config.json"), ("config.json is not JSON", "again")),
    "list as config": (write("config.json", "[]"), ("config.json", "JSON list", "again")),
    "no model_type": (settings(model_type=None), ("config.json", "no model_type", "again")),
    "unknown model_type": (settings(model_type="qwen2000"), ("config.json", "`qwen2000`", "did you mean")),
    "remote code": (
        settings(model_type="zzz", auto_map={"AutoModelForCausalLM": "a.B"}),
        ("config.json", "`zzz`", "set model.trust_remote_code: true"),
    ),
    "masked": (settings(architectures=["BertForMaskedLM"]), ("BertForMaskedLM", "ForCausalLM")),
    "classifier": (
        settings(architectures=["Qwen2ForSequenceClassification"]),
        ("does not continue texts", "ForCausalLM"),
    ),
    "GPTQ": (settings(quantization_config={"quant_method": "gptq"}), ("(gptq)", "cannot be trained")),
    "AWQ": (settings(quantization_config={"quant_method": "awq"}), ("(awq)", "bfloat16 or float32")),
    "bitsandbytes": (
        settings(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("(bitsandbytes)", "cannot be trained"),
    ),
    "compressed": (settings(compression_config={"format": "int"}), ("cannot be trained",)),
    "GPTQ of old": (write("quantize_config.json", "{}"), ("quantize_config.json", "cannot be trained")),
    "qweight": (
        lambda one: safetensors(one / WEIGHTS, TENSORS | {"model.layers.0.q.qweight": (1, 1)}),
        ("qweight", "cannot be trained"),
    ),
    "no tokenizer": (lambda one: (one / "tokenizer.json").unlink(), ("no tokenizer", "save it there")),
    "damaged tokenizer": (lambda one: cut(one, "tokenizer.json"), ("tokenizer.json is not JSON", "again")),
    "damaged settings": (write("generation_config.json", "{"), ("generation_config.json", "again")),
    "larger tokenizer": (
        lambda one: change(one, "tokenizer.json", model={"vocab": {"a": 0, "b": 8}}),
        ("tokens up to 8", "vocab_size in config.json is 8", "same model"),
    ),
    "larger unigram": (
        lambda one: change(one, "tokenizer.json", model={"vocab": [["a", 0.0]] * 9}),
        ("tokens up to 8", "same model"),
    ),
    "other embedding": (
        lambda one: safetensors(one / WEIGHTS, TENSORS | {"model.embed_tokens.weight": (6, 4)}),
        ("embed_tokens.weight", "6 rows", "vocab_size in config.json is 8"),
    ),
    "fewer layers": (settings(num_hidden_layers=3), ("have 1 layers", "num_hidden_layers", "is 3")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_with_its_file_and_a_way_out(tmp_path: Path, fault: str) -> None:
    directory = model_files(tmp_path / "model")
    assert model_problems(directory, remote_code=False) == []
    damage, said = FAULTS[fault]
    damage(directory)
    (problem,) = model_problems(directory, remote_code=False)
    assert str(directory) in problem and "; " in problem, "the place, and what to do"
    assert all(words in problem for words in said), problem
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


def test_the_types_that_transformers_knows_are_those_it_lists() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert set(CONFIG_MAPPING_NAMES) <= set(module._known_types())
