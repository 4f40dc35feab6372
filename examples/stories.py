"""Makes a storyteller and the task to use two given words: `python examples/stories.py DIRECTORY`.

    DIRECTORY/model/        15 M parameters, 60 MB, from the Hugging Face hub; with wider heads
    DIRECTORY/train.jsonl   {"prompt": "Words: pen, crab.\\nOnce upon a time", "words": ["pen", "crab"]}
    DIRECTORY/test.jsonl    the same, with words that no training row has

The model is stories15M by Andrej Karpathy (MIT licence), trained on TinyStories; `MODEL` is its name on the
hub. Its heads have 48 numbers, and vLLM's attention on CPUs takes 32, 64, 80, 96 and more. So the heads are
widened to 96, which changes no output. A second argument names another hub model, or a directory with a copy.
"""

import argparse
import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import DataError
from asyncrl.run.directory import write_directory

MODEL, REVISION = "Xenova/llama2.c-stories15M", "17c2f1eabe1e163acc15ad35e225794e7b907682"
HEAD = 96
END_OF_STORY = [1, 2]  # the model was trained on stories that the start token of the next one separates
START = "Once upon a time, there was a"
TRAINING = (
    "apple bear bee bird boat book box bread bus butterfly cake candle car castle cat chair cloud coat "
    "cookie cow crab cup dog doll door dragon drum duck egg farm fire fish flower fox frog garden ghost "
    "grass hat horse house ice juice key king kite knife lamp leaf lion milk monkey moon mouse owl park "
    "pen pig rain robot snow sword"
)
HELD_OUT = (
    "rabbit river rock ship shoe sky soup spider star stone sun tent tiger train truck turtle whale wolf "
    "worm zebra"
)


def make_stories(directory: Path, model: str = MODEL) -> None:
    """Write model and rows to `directory`, which must not exist. Raises DataError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if directory.exists():
        raise DataError(f"{directory} exists; remove it or name another directory")
    where: dict[str, str] = {"revision": REVISION} if model == MODEL else {}
    try:
        narrow = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(model, **where)
    except (OSError, ValueError) as error:  # no network, an unknown model, files of another kind
        raise DataError(
            f"cannot load {model}: {error}; check the network, or give a directory with a copy as MODEL"
        ) from error
    with write_directory(directory) as writing:
        wide = widen_heads(narrow, HEAD)
        wide.generation_config.eos_token_id = END_OF_STORY
        wide.save_pretrained(writing / "model")
        tokenizer.save_pretrained(writing / "model")
        for name, words, count in (("train", TRAINING, 2000), ("test", HELD_OUT, 120)):
            lines = [json.dumps(row) + "\n" for row in story_rows(words.split(), count)]
            (writing / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def story_rows(words: list[str], count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw `count` different pairs of words, each with its prompt."""
    pairs = [[first, second] for first in words for second in words if first != second]
    return [
        {"prompt": f"Words: {first}, {second}.\n{START}", "words": [first, second]}
        for first, second in random.Random(seed).sample(pairs, count)
    ]


def widen_heads(narrow: Any, width: int) -> Any:
    """Return the same Llama with heads of `width` numbers, a multiple of before. The new ones are and stay 0.

    Number k of a head moves to place k * factor, where the rotary embedding turns it by the same angle.
    Attention divides by the square root of the width, so queries are multiplied by the root of the factor.
    """
    config = copy.deepcopy(narrow.config)
    head = config.head_dim  # 48, or 96 in a copy of what this has made
    factor = width // head
    config.head_dim = width
    places = torch.arange(head) * factor
    wide = type(narrow)(config).to(narrow.dtype)
    wide.load_state_dict(
        {name: _widened(name, tensor, head, width, places) for name, tensor in narrow.state_dict().items()}
    )
    return wide


def _widened(name: str, tensor: Tensor, head: int, width: int, places: Tensor) -> Tensor:
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        rows = tensor.view(-1, head, tensor.shape[1])
        result = tensor.new_zeros(rows.shape[0], width, tensor.shape[1])
        result[:, places] = rows * math.sqrt(width / head) if "q_proj" in name else rows
        return result.flatten(0, 1)
    if name.endswith("o_proj.weight"):
        columns = tensor.view(tensor.shape[0], -1, head)
        result = tensor.new_zeros(tensor.shape[0], columns.shape[1], width)
        result[:, :, places] = columns
        return result.flatten(1)
    return tensor


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="place of model and rows")
    parser.add_argument("model", nargs="?", default=MODEL, metavar="MODEL", help="other hub model, or a copy")
    try:
        make_stories(**vars(parser.parse_args()))
    except DataError as error:
        parser.error(str(error))
