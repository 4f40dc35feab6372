"""The state of torch's, numpy's and Python's random generators as plain tensors: no pickle."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file


def save_rng(path: Path) -> None:
    """Write the state of this process's generators to `path`, a safetensors file."""
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    # The layout of CPython's and numpy's global generators.
    assert (version, numpy_state["bit_generator"]) == (3, "MT19937")
    keys, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    state = {
        "torch": torch.get_rng_state(),
        "python_words": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy_keys": torch.tensor(keys.astype(np.int64)),
        "numpy_position": torch.tensor([position, numpy_state["has_gauss"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    save_file(state, path)


def load_rng(path: Path) -> None:
    """The inverse of `save_rng`."""
    state = load_file(path)
    torch.set_rng_state(state["torch"])
    gauss = next(iter(state["python_gauss"].tolist()), None)
    random.setstate((3, tuple(state["python_words"].tolist()), gauss))
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(state["numpy_gauss"][0])))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
