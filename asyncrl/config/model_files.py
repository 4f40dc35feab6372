"""Reads the files of a model directory, without loading the model, and says why it could not be trained.

Of weights only the headers are read, so this takes milliseconds for a model of any size.
"""

import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.library_fields import source_in
from asyncrl.config.wording import did_you_mean
from asyncrl.errors import DataError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
CONFIG, INDEX_SUFFIX = "config.json", ".index.json"
# In the order in which transformers looks for them; each may have an index of shards instead.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Settings of quantised weights that tools write next to a config.json which does not mention them.
QUANTISED_FILES = ("quantize_config.json", "quant_config.json")
AGAIN = "copy or download it again"
# Beginnings of files that stand where another format is expected.
KINDS = {
    b"version https://git-lfs": "a git-LFS pointer instead of the file; run `git lfs pull` in its directory",
    b"<!doctype html": "a web page; download the file itself",
    b"<html": "a web page; download the file itself",
    b"gguf": "a GGUF file; give the original model in the safetensors format",
}
LONGEST_HEADER = 100_000_000  # safetensors' own limit, in bytes
BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
        "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8}  # fmt: skip
QUANTISED = re.compile(r"(?:^|\.)(?:qweight|weight_packed|weight_scale_inv|weight\.absmax)$")
EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings)\.weight$")
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
OTHER_TASK = re.compile(r"For(?:MaskedLM|\w+Classification|QuestionAnswering|MultipleChoice|PreTraining)$")
# Architectures that place images by plain causal attention, and that tests hold.
WITH_IMAGES = ("idefics3",)
SHOWN = 3  # files or mistakes that a message names


class Tensor(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str
    shape: Sequence[int]


class Unusable(Exception):
    """A file cannot be used; the text names the file, what was found, and what to do."""


def require_loadable(path: str, *, remote_code: bool) -> None:
    """Raise DataError if `path` is a directory with a model that cannot be loaded. Hub names are ignored.

    The tokenizer is not looked at: a model is loaded without it.
    """
    directory = Path(path)
    if directory.is_dir() and (found := model_problems(directory, remote_code=remote_code, tokenizer=False)):
        raise DataError(f"model.path: {'; and '.join(found[:SHOWN])}")


def model_problems(directory: Path, *, remote_code: bool, tokenizer: bool = True) -> list[str]:
    """Say why a model cannot be loaded, trained or used with its tokenizer; an empty list if it can be.

    With `remote_code`, its architecture may be one that transformers does not know. Without `tokenizer`,
    only what loading the weights needs is read.
    """
    if other := _other_format(directory):
        return [other]
    found = []
    try:
        config = read_settings(directory)
        found += [*_architecture(config, directory, remote_code=remote_code), *_quantised(config, directory)]
    except Unusable as unusable:
        config = {}
        found.append(str(unusable))
    for check in (_tokenizer, _weights) if tokenizer else (_weights,):
        try:
            found += check(directory, config)
        except Unusable as unusable:
            found.append(str(unusable))
    return found


def read_settings(directory: Path) -> dict[str, Any]:
    """Return config.json, with the keys of its part for text. Raises Unusable."""
    config = _read_json(directory / CONFIG)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def image_problem(kind: str) -> str | None:
    """Say why a model of this model_type cannot see the images of rows; None if it can."""
    if kind in WITH_IMAGES:
        return None
    found = f"data.images_key is set, but the architecture is {kind}"
    return f"{found}; those with images are {', '.join(WITH_IMAGES)}: choose such a model, or remove the key"


def ends_no_response(directory: Path) -> bool:
    """Return whether no file of a model names an end token, at which responses would stop."""
    for name, key in (
        (CONFIG, "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
        ("tokenizer_config.json", "eos_token"),
        ("special_tokens_map.json", "eos_token"),
    ):
        with suppress(Unusable):
            values = read_settings(directory) if name == CONFIG else _read_json(directory / name)
            if values.get(key) not in (None, "", []):
                return False
    return True


def _other_format(directory: Path) -> str:
    """Name the format of a directory that holds no whole model of transformers, if it is a known one."""
    if (directory / CONFIG).exists():
        return ""
    if (adapter := directory / "adapter_config.json").exists():
        base = usable_json(adapter).get("base_model_name_or_path") or "its base model"
        found = f"{directory} holds a LoRA adapter (adapter_config.json) and not a whole model"
        return f"{found}; set model.path to {base}, and model.lora.start to this directory"
    if files := sorted(directory.glob("*.gguf")):
        found = f"{directory} holds {files[0].name}, and GGUF weights are for inference"
        return f"{found}; give the directory of the original model, with config.json and safetensors"
    return ""


def _architecture(config: Mapping[str, Any], directory: Path, *, remote_code: bool) -> Iterator[str]:
    file, kind = directory / CONFIG, config.get("model_type")
    names = config.get("architectures") or []
    if not isinstance(kind, str) or not kind:
        if not remote_code:
            yield f"{file} has no model_type, by which transformers chooses the architecture; {AGAIN}"
    elif not remote_code and (known := _known_types()) and kind not in known:
        if config.get("auto_map"):
            cure = "; read the Python code that comes with the model, and set model.trust_remote_code: true"
        else:
            cure = did_you_mean(kind, known, "install a transformers release that has it")
        yield f"{file} has model_type `{kind}`, which the installed transformers does not know{cure}"
    if names and all(OTHER_TASK.search(str(name)) for name in names):
        found = f"{file} has the architecture {names[0]}, which does not continue texts"
        yield f"{found}; give a causal language model (...ForCausalLM)"


def _known_types() -> list[str]:
    """Return every model_type of the installed transformers, without its slow import."""
    names = ("auto_mappings.py", "configuration_auto.py")
    files = [source_in("transformers", "models", "auto", name) for name in names]
    texts = [file.read_text() for file in files if file]
    return [kind for text in texts for kind in re.findall(r'"([\w.-]+)"\s*[,:]\s*"\w+Config"', text)]


def _quantised(config: Mapping[str, Any], directory: Path) -> Iterator[str]:
    settings = config.get("quantization_config") or config.get("compression_config")
    file = next((name for name in QUANTISED_FILES if (directory / name).is_file()), None)
    if settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        yield _of_quantised(
            f"{directory / CONFIG} has quantization_config ({method or 'of no known method'})"
        )
    elif file:
        yield _of_quantised(f"{directory} holds {file}")


def _of_quantised(found: str) -> str:
    cure = "give the same model in bfloat16 or float32; generator.vllm.quantization quantises for sampling"
    return f"{found}: quantised weights cannot be trained; {cure}"


def _tokenizer(directory: Path, config: Mapping[str, Any]) -> Iterator[str]:
    if not any((directory / name).is_file() for name in TOKENIZERS):
        yield f"found no tokenizer in {directory}; needed is one of {', '.join(TOKENIZERS)}; save it there"
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (directory / name).exists():
            _read_json(directory / name)
    vocabulary: Any = None
    for name in ("tokenizer.json", "vocab.json"):
        if vocabulary is None and (directory / name).exists():
            values = _read_json(directory / name)
            model = values.get("model", {})
            vocabulary = values if name == "vocab.json" else isinstance(model, dict) and model.get("vocab")
    rows, ids = config.get("vocab_size"), vocabulary.values() if isinstance(vocabulary, dict) else ()
    numbers = [one for one in ids if isinstance(one, int)]
    largest = max(numbers, default=-1) if numbers else len(vocabulary or ()) - 1
    if isinstance(rows, int) and largest >= rows:
        found = (
            f"the tokenizer in {directory} has tokens up to {largest}, but vocab_size in {CONFIG} is {rows}"
        )
        yield f"{found}, so the model has no embedding for some; copy all files from the same model"


def _weights(directory: Path, config: Mapping[str, Any]) -> Iterator[str]:
    for name in WEIGHTS:
        file, index = directory / name, directory / f"{name}{INDEX_SUFFIX}"
        if file.is_file() or file.is_symlink():
            yield from _unfit(_read_tensors(file), config, directory)
            return
        if index.exists():
            yield from _shards(index, config)
            return
    others = sorted(one.name for one in directory.glob("*.safetensors"))
    if others:
        found = f"found {', '.join(others[:SHOWN])} in {directory}, but neither {WEIGHTS[0]} nor its index"
        yield f"{found} ({WEIGHTS[0]}{INDEX_SUFFIX}), which says what is in which file; copy it too"
        return
    needed = " or ".join(WEIGHTS)
    yield f"found no weights in {directory}; needed is {needed}, or shards; download or save them there"


def _shards(index: Path, config: Mapping[str, Any]) -> Iterator[str]:
    placed = _read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise Unusable(f"{index} has no weight_map, which says what is in which file; {AGAIN}")
    names = sorted(set(map(str, placed.values())))
    if missing := [name for name in names if not (index.parent / name).exists()]:
        shown = ", ".join(missing[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
        cure = "copy or download them too"
        yield f"{index} names {len(names)} files, of which {len(missing)} are missing: {shown}; {cure}"
        return
    tensors: dict[str, Tensor] = {}
    for name in names:
        found = _read_tensors(index.parent / name)
        lost = [tensor for tensor, shard in placed.items() if shard == name and found and tensor not in found]
        if lost:
            text = f"{index.parent / name} lacks {lost[0]}, which {index.name} places there"
            raise Unusable(f"{text}; copy all files from the same model")
        tensors |= found
    yield from _unfit(tensors, config, index.parent)


def _unfit(tensors: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """Compare the tensors of all files with config.json."""
    same = "copy all files from the same model"
    quantised = [name for name in tensors if QUANTISED.search(name)]
    if quantised and not (config.get("quantization_config") or config.get("compression_config")):
        yield _of_quantised(f"{directory} holds the tensor {quantised[0]}")
    rows = {name: one.shape[0] for name, one in tensors.items() if EMBEDDING.search(name) and one.shape}
    wanted, layers = config.get("vocab_size"), config.get("num_hidden_layers")
    if rows and isinstance(wanted, int) and wanted not in rows.values():
        name = min(rows, key=len)
        yield f"{name} in {directory} has {rows[name]} rows, but vocab_size in {CONFIG} is {wanted}; {same}"
    numbers = [int(found[1]) for name in tensors if (found := LAYER.search(name))]
    if numbers and isinstance(layers, int) and max(numbers) + 1 < layers:
        text = f"the weights in {directory} have {max(numbers) + 1} layers, but num_hidden_layers in {CONFIG}"
        yield f"{text} is {layers}; {same}"


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; none for torch's own format. Raises Unusable."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(64)
            _refuse_other(path, first)
            if path.suffix != ".safetensors":
                if first.startswith(b"PK") and not zipfile.is_zipfile(path):
                    raise Unusable(f"{path} is cut off at {size:,} bytes; {AGAIN}")
                return {}
            file.seek(8)
            length = int.from_bytes(first[:8], "little")
            header = file.read(length) if length <= min(LONGEST_HEADER, size) else b""
    except OSError as error:
        raise Unusable(_unreadable(path, error)) from error
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {name: Tensor(one["dtype"], one["shape"]) for name, one in entries.items()}
        spans = sorted((*one["data_offsets"], name) for name, one in entries.items())
        expected = 8 + length + max((end for _, end, _ in spans), default=0)
        wrong = next((name for begin, end, name in spans if not _fits(tensors[name], end - begin)), None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        found = f"{path} ({size:,} bytes) has no header of the safetensors format"
        raise Unusable(f"{found}: it is cut off or another file; {AGAIN}") from error
    if size != expected:
        found = f"{path} has {size:,} bytes, but its header describes {expected:,}"
        raise Unusable(f"{found}: it is {'cut off' if size < expected else 'damaged'}; {AGAIN}")
    if wrong is not None:
        raise Unusable(f"{path} has a damaged header: the size of {wrong} is not that of its shape; {AGAIN}")
    return tensors


def _fits(tensor: Tensor, size_bytes: int) -> bool:
    """Return whether a tensor has this size, or a data type that is not known here."""
    bits = BITS.get(tensor.dtype)
    return bits is None or math.prod(tensor.shape) * bits == 8 * size_bytes


def usable_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; an empty one if the file cannot be used."""
    with suppress(Unusable, ValueError):  # the latter of a path that no file can have
        return _read_json(path)
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds. Raises Unusable."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unusable(_unreadable(path, error)) from error
    _refuse_other(path, data[:64])
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path} is not JSON ({error}); {AGAIN}") from error
    if not isinstance(values, dict):
        raise Unusable(f"{path} holds a JSON {type(values).__name__} instead of an object; {AGAIN}")
    return values


def _refuse_other(path: Path, first: bytes) -> None:
    """Raise Unusable for an empty file, and for the beginning of a format that often stands in its place."""
    if not first:
        raise Unusable(f"{path} is empty; {AGAIN}")
    for beginning, said in KINDS.items():
        if first.lstrip().lower().startswith(beginning):
            raise Unusable(f"{path} is {said}")


def _unreadable(path: Path, error: OSError) -> str:
    if path.is_symlink() and not path.exists():
        return f"{path} is a link to {path.readlink()}, which does not exist; {AGAIN}"
    return f"cannot read {path}: {error.strerror}; give a Hugging Face model directory"
