"""Faults of a model directory as downloads and other tools leave them, and the words that must name each."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.support.model_files import TENSORS, safetensors

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
    "adapter": (adapter, ("LoRA adapter", "set model.path to Qwen/Qwen3-0.6B, and model.lora.start")),
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
