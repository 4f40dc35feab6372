"""Model directories of a few bytes, whose headers are whole; no library loads them."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

TENSORS = {"model.embed_tokens.weight": (8, 4), "model.layers.0.mlp.weight": (4, 4)}
SETTINGS = {"model_type": "qwen2", "vocab_size": 8, "num_hidden_layers": 1, "eos_token_id": 1}


def safetensors(path: Path, shapes: Mapping[str, Sequence[int]] = TENSORS) -> Path:
    """Write float32 zeros in the format as its page describes it: length, header, data."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


def model_files(directory: Path, **settings: object) -> Path:
    """Make a directory that can be read, with `settings` in its config.json."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SETTINGS | settings))
    vocabulary = {f"t{index}": index for index in range(8)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    safetensors(directory / "model.safetensors")
    return directory
