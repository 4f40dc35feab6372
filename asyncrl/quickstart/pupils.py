"""Makes the tiny models of `configs/guess.yaml` and `configs/calculator.yaml`: pupils that play badly.

    directory/model/        as the quick-start model, with the characters of the game
    directory/train.jsonl   rows with a prompt and the columns that the game's `reset` takes
    directory/test.jsonl    held-out rows, if the game has any

The supervised warm-up shows games of careless pupils, so the model knows each move, but not which are good.
Every answer of the model ends with <eos>; what the game says behind it is not trained on.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import RunError
from asyncrl.quickstart.games import LARGEST, Calculator, Guess
from asyncrl.quickstart.tiny import EOS, IGNORED, PAD, Size, make_model, make_tokenizer, train_on
from asyncrl.quickstart.warmup import careless_sum
from asyncrl.run.directory import write_directory

GAMES = 20_000  # played for the warm-up


class Guesser:
    """Guesses between the bounds that it knows, but ignores them at every third guess."""

    characters = "0123456789<>?:"
    ignores = 0.35

    def rows(self, draw: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows to train on, and held-out rows: none, as all numbers can be learned."""
        return [{"prompt": ":", "secret": secret} for secret in range(LARGEST + 1)], []

    def play(self, row: dict[str, Any], draw: random.Random) -> list[str]:
        """Return the texts of one game in turn: the prompt, an answer, an observation, an answer, ..."""
        game, texts = Guess(), [row["prompt"]]
        game.reset(row["secret"])
        low, high, done = 0, LARGEST, False
        while not done:
            guess = draw.randint(0, LARGEST) if draw.random() < self.ignores else draw.randint(low, high)
            said, _, done = game.step(f"{guess:02}")
            low, high = (low, min(high, guess - 1)) if said == "<" else (max(low, guess + 1), high)
            texts += [f"{guess:02}", said]
        return texts[:-1]


class Adder:
    """Adds in its head without carries; seldom asks the calculator, and then often wrongly or in vain."""

    characters = "0123456789+=?>"
    asks, garbles, ignores = 0.2, 0.4, 0.3

    def rows(self, draw: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows to train on, and held-out rows; a careless answer is wrong in each."""
        pairs = [(100 + pair // 900, 100 + pair % 900) for pair in range(900 * 900)]
        rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in draw.sample(pairs, len(pairs)))
        carried = (row for row in rows if careless_sum(row["prompt"]) != row["answer"])
        chosen = list(itertools.islice(carried, 4256))
        return chosen[256:], chosen[:256]

    def play(self, row: dict[str, Any], draw: random.Random) -> list[str]:
        """Return the texts of one game as `Guesser` does."""
        game, prompt = Calculator(), row["prompt"]
        game.reset(row["answer"])
        if draw.random() >= self.asks:
            return [prompt, careless_sum(prompt)]
        asked = f"?{prompt[:-1]}"
        if draw.random() < self.garbles:
            place = draw.choice((1, 2, 3, 5, 6, 7))
            asked = f"{asked[:place]}{draw.randint(1, 9)}{asked[place + 1 :]}"
        said, _, _ = game.step(asked)
        return [prompt, asked, said, careless_sum(prompt) if draw.random() < self.ignores else said[:-1]]


Pupil = Guesser | Adder
PUPILS: dict[str, Pupil] = {"guess": Guesser(), "calculator": Adder()}


def make_pupil(game: str, directory: Path, size: Size, report: Callable[[str], None]) -> None:
    """Write model and rows to `directory`, which must not exist, in about a minute. Raises RunError."""
    if directory.exists():
        raise RunError(f"{directory} exists; remove it or name another directory")
    pupil, draw = PUPILS[game], random.Random(size.seed)
    report(f"making a model that plays {game} badly in {directory}: about a minute")
    train, test = pupil.rows(draw)
    with write_directory(directory) as writing:
        for name, rows in (("train", train), ("test", test)):
            (writing / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = make_model(size, pupil.characters)
        train_on(model, batches(pupil, train, size), size, report)
        model.save_pretrained(writing / "model")
        make_tokenizer(pupil.characters).save_pretrained(writing / "model")


def batches(pupil: Pupil, rows: list[dict[str, Any]], size: Size) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens_BT, labels_BT) of random games; only the pupil's answers have labels."""
    tokenizer, draw = make_tokenizer(pupil.characters), random.Random(size.seed)
    games = [pupil.play(draw.choice(rows), draw) for _ in range(GAMES)]
    encoded = []
    for texts in games:
        ids: list[int] = []
        labels: list[int] = []
        for index, text in enumerate(texts):
            piece = tokenizer(text, add_special_tokens=index == 0)["input_ids"]
            is_answer = index % 2 == 1
            ids += [*piece, EOS] if is_answer else piece
            labels += [*piece, EOS] if is_answer else [IGNORED] * len(piece)
        encoded.append((ids, labels))
    longest = max(len(ids) for ids, _ in encoded)
    tokens_NT = torch.tensor([ids + [PAD] * (longest - len(ids)) for ids, _ in encoded])
    labels_NT = torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in encoded])
    torch_draw = torch.Generator().manual_seed(size.seed)
    for _ in range(size.steps):
        index_B = torch.randint(len(games), (size.batch,), generator=torch_draw)
        yield tokens_NT[index_B], labels_NT[index_B]
