"""Makes the tiny models of the shipped configs, which are bad at their tasks, each in about a minute.

    python examples/pupils.py sums DIRECTORY           # configs/quickstart.yaml; shipped with the package
    python examples/pupils.py guess DIRECTORY          # configs/guess.yaml
    python examples/pupils.py calculator DIRECTORY     # configs/calculator.yaml and configs/agent.yaml

    DIRECTORY/model/        Qwen2 of 0.6 M parameters, character tokenizer; an ordinary Hugging Face directory
    DIRECTORY/train.jsonl   {"prompt": "12+34=", "answer": "46"}, or the columns that the game's `reset` takes
    DIRECTORY/test.jsonl    held-out rows, if the task has any; sums that train.jsonl has in neither order
    DIRECTORY/build.json    of sums: the settings; a second request with the same settings returns immediately

The supervised warm-up trains on sums of which two in three forget every carry. With greedy decoding the model
is then right if there is nothing to carry, in less than a third of the held-out sums. It has both habits, and
reinforcement learning finds the one that is rewarded. The model of seed 0 is asyncrl/quickstart/adder.

That of a game shows games of careless pupils, so the model knows each move, but not which are good. Every
answer of the model ends with <eos>; what the game says behind it is not trained on. One seed gives the same
weights on the same machine.
"""

import argparse
import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import RunError
from asyncrl.quickstart.first_task import RECORD, found_model
from asyncrl.quickstart.games import LARGEST, Calculator, Guess
from asyncrl.run.directory import write_directory

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ("<pad>", "<bos>", "<eos>")
IGNORED = -100  # label of tokens outside the answer, which torch's cross-entropy ignores
POSITIONS = 64  # longest text, in tokens
CHARACTERS = "0123456789+="  # of sums
GAMES = 20_000  # played for the warm-up

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a model, and of its warm-up."""

    seed: int = 0
    layers: int = 3
    hidden: int = 128
    heads: int = 4  # head size 32, the smallest that vLLM's CPU attention supports
    intermediate: int = 384
    # About 1 / sqrt(hidden). With the usual 0.02, a model this small starts to learn three times later.
    initializer_range: float = 0.08
    lr: float = 1e-3  # rises for `lr_rise` steps, then falls linearly to 0
    lr_rise: int = 20
    batch: int = 128
    steps: int = 500
    report_every: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums(Size):
    """Everything that the model of sums depends on."""

    test_rows: int = 512
    correct_share: float = 0.35  # share of correct sums in the warm-up; the others forget the carries

    @property
    def digest(self) -> str:
        """Identifies the build; the leading number changes with the recipe."""
        return hashlib.sha256(json.dumps([2, asdict(self)], sort_keys=True).encode()).hexdigest()


def make_tokenizer(characters: str) -> Any:
    """Make a tokenizer with one token per character and <bos> in front of every text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    marks = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **marks)


def encode_games(tokenizer: Any, games: Iterable[Sequence[str]]) -> tuple[Tensor, Tensor]:
    """Return (tokens_BT, labels_BT) of texts in turn: a prompt, an answer, an observation, an answer, ...

    Answers get an <eos>. Only they and their <eos> have labels.
    """
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
    tokens_BT = torch.tensor([ids + [PAD] * (longest - len(ids)) for ids, _ in encoded])
    labels_BT = torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in encoded])
    return tokens_BT, labels_BT


def make_model(size: Size, characters: str) -> Any:
    """Make a model initialised from the seed."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(size.seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(SPECIALS) + len(characters),
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            max_position_embeddings=POSITIONS,
            initializer_range=size.initializer_range,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            dtype=torch.float32,
        )
    )


def train_on(
    model: Any,
    batches: Iterable[tuple[Tensor, Tensor]],
    size: Size,
    report: Callable[[str], None],
    judged: Callable[[], str] = str,
) -> None:
    """Train on `size.steps` batches (tokens_BT, labels_BT); every report ends with what `judged` says."""
    started_at_s = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min(1.0, (done + 1) / size.lr_rise) * (1.0 - done / size.steps)
    )
    with _one_thread():
        for step, (tokens_BT, labels_BT) in enumerate(batches, start=1):
            loss = model(input_ids=tokens_BT, labels=labels_BT).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % size.report_every == 0 or step == size.steps:
                done, seconds = f"warm-up step {step}/{size.steps}", time.monotonic() - started_at_s
                report(f"{done}: loss {loss.item():.3f}{judged()}, {seconds:.0f} s")


@contextmanager
def _one_thread() -> Iterator[None]:
    """More threads slow a model this small down, and their number would change the result."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _write_rows(directory: Path, train: Sequence[Row], test: Sequence[Row]) -> None:
    for name, rows in (("train", train), ("test", test)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_sums(directory: Path, settings: Sums, report: Callable[[str], None]) -> float:
    """Make model and data unless they exist; return the greedy accuracy on held-out sums. Raises RunError."""
    if (built := found_model(directory, settings.digest, report)) is None:
        report(f"making the quick-start model in {directory}: about a minute, once")
        train, test = split_sums(settings.seed, settings.test_rows)
        with write_directory(directory) as writing:
            _write_rows(writing, train, test)
            accuracy = _warm_up(settings, train, test, writing / "model", report)
            built = {"digest": settings.digest, "accuracy": accuracy}
            (writing / RECORD).write_text(json.dumps(built | {"settings": asdict(settings)}, indent=1))
    return float(built["accuracy"])


def split_sums(seed: int, test_rows: int) -> tuple[list[Row], list[Row]]:
    """Return (train, test): all sums of two two-digit numbers, with a+b and b+a on the same side."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
    sides: tuple[list[Row], list[Row]] = ([], [])
    for a, b in (pairs[index] for index in order):
        held_out = len(sides[1]) < test_rows
        for x, y in {(a, b), (b, a)}:
            sides[held_out].append({"prompt": f"{x}+{y}=", "answer": str(x + y)})
    return sides[0], sides[1][:test_rows]


def careless_sum(prompt: str) -> str:
    """Add digit by digit without carries, for a prompt such as `12+34=`."""
    a, b = prompt.rstrip("=").split("+")
    return "".join(str((int(x) + int(y)) % 10) for x, y in zip(a, b, strict=True))


def greedy_accuracy(model: Any, tokenizer: Any, rows: Sequence[Row]) -> float:
    """Return the share of rows that the model answers correctly with greedy decoding."""
    tokens_BT, labels_BT = _encode_sums(tokenizer, rows)
    with torch.no_grad():
        # Greedy decoding gives the answer if and only if each token is the argmax after its true prefix.
        best_BT = model(input_ids=tokens_BT).logits[:, :-1].argmax(-1)
    wanted_BT = labels_BT[:, 1:]
    return float(((best_BT == wanted_BT) | (wanted_BT == IGNORED)).all(-1).float().mean())


def _warm_up(
    settings: Sums, train: Sequence[Row], test: Sequence[Row], target: Path, report: Callable[[str], None]
) -> float:
    """Train, save model and tokenizer in `target`, and return the accuracy of the saved model."""
    tokenizer, model = make_tokenizer(CHARACTERS), make_model(settings, CHARACTERS)

    def judged() -> str:
        return f", held-out accuracy {greedy_accuracy(model, tokenizer, test):.0%}"

    train_on(model, _batches_of_sums(tokenizer, train, settings), settings, report, judged)
    model.half().float()
    accuracy = greedy_accuracy(model, tokenizer, test)
    model.half().save_pretrained(target)  # half the size
    tokenizer.save_pretrained(target)
    return accuracy


def _batches_of_sums(tokenizer: Any, train: Sequence[Row], settings: Sums) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens_BT, labels_BT) of random sums, of which `correct_share` are correct."""
    careless = [{"prompt": row["prompt"], "answer": careless_sum(row["prompt"])} for row in train]
    # One table of correct and then careless answers, so that they have the same padding.
    tokens_NT, labels_NT = _encode_sums(tokenizer, [*train, *careless])
    draw = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        index_B = torch.randint(len(train), (settings.batch,), generator=draw)
        is_careless_B = torch.rand(settings.batch, generator=draw) >= settings.correct_share
        chosen_B = index_B + is_careless_B * len(train)
        yield tokens_NT[chosen_B], labels_NT[chosen_B]


def _encode_sums(tokenizer: Any, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    return encode_games(tokenizer, [[row["prompt"], row["answer"]] for row in rows])


class Guesser:
    """Guesses between the bounds that it knows, but ignores them at every third guess."""

    characters = "0123456789<>?:"
    ignores = 0.35

    def rows(self, draw: random.Random) -> tuple[list[Row], list[Row]]:
        """Return the rows to train on, and held-out rows: none, as all numbers can be learned."""
        return [{"prompt": ":", "secret": secret} for secret in range(LARGEST + 1)], []

    def play(self, row: Row, draw: random.Random) -> list[str]:
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

    def rows(self, draw: random.Random) -> tuple[list[Row], list[Row]]:
        """Return the rows to train on, and held-out rows; a careless answer is wrong in each."""
        pairs = [(100 + pair // 900, 100 + pair % 900) for pair in range(900 * 900)]
        rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in draw.sample(pairs, len(pairs)))
        carried = (row for row in rows if careless_sum(row["prompt"]) != row["answer"])
        chosen = list(itertools.islice(carried, 4256))
        return chosen[256:], chosen[:256]

    def play(self, row: Row, draw: random.Random) -> list[str]:
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
    """Write model and rows to `directory`, which must not exist. Raises RunError."""
    if directory.exists():
        raise RunError(f"{directory} exists; remove it or name another directory")
    pupil, draw = PUPILS[game], random.Random(size.seed)
    report(f"making a model that plays {game} badly in {directory}: about a minute")
    train, test = pupil.rows(draw)
    with write_directory(directory) as writing:
        _write_rows(writing, train, test)
        model = make_model(size, pupil.characters)
        train_on(model, batches_of_games(pupil, train, size), size, report)
        model.save_pretrained(writing / "model")
        make_tokenizer(pupil.characters).save_pretrained(writing / "model")


def batches_of_games(pupil: Pupil, rows: list[Row], size: Size) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens_BT, labels_BT) of random games; only the pupil's answers have labels."""
    draw = random.Random(size.seed)
    games = [pupil.play(draw.choice(rows), draw) for _ in range(GAMES)]
    tokens_NT, labels_NT = encode_games(make_tokenizer(pupil.characters), games)
    torch_draw = torch.Generator().manual_seed(size.seed)
    for _ in range(size.steps):
        index_B = torch.randint(len(games), (size.batch,), generator=torch_draw)
        yield tokens_NT[index_B], labels_NT[index_B]


def main() -> None:
    """Make what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("game", choices=["sums", *PUPILS], help="what the model is to learn")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="place of model and rows")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        if arguments.game == "sums":
            make_sums(arguments.directory, Sums(seed=arguments.seed), print)
        else:
            make_pupil(arguments.game, arguments.directory, Size(seed=arguments.seed), print)
    except RunError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
