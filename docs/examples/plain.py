"""The task of docs/tutorial.md, to answer in a plain sentence. Run as a program, it writes build/plain."""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

TRAIN = (
    "duck", "leaf", "river", "stone", "candle", "boat", "garden", "clock", "bridge", "apple",
    "horse", "window", "lamp", "chair", "forest", "pencil", "cloud", "shoe", "bottle", "train",
)  # fmt: skip
HELD_OUT = (
    "owl", "spoon", "ladder", "island", "violin", "pillow", "rocket", "mirror",
    "basket", "turtle", "kettle", "glove", "anchor", "drum", "peach", "whale",
)  # fmt: skip


def plain(prompt: str, response: str, **columns: object) -> float:
    """Score 1 for at least eight words without a comma."""
    return float("," not in response and len(response.split()) >= 8)


def prompts(nouns: Sequence[str], count: int) -> list[str]:
    """Return `count` prompts with different pairs of nouns, the same ones at every call."""
    pairs = random.Random(0).sample(list(itertools.combinations(nouns, 2)), count)
    return [f"Describe a {first} and a {second}." for first, second in pairs]


def main() -> None:
    """Write 180 prompts for training, and 120 with other nouns for evaluation."""
    directory = Path("build/plain")
    directory.mkdir(parents=True, exist_ok=True)
    for name, nouns, count in (("train", TRAIN, 180), ("test", HELD_OUT, 120)):
        rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts(nouns, count)]
        (directory / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
