"""Makes the quick-start model: a tiny transformer that adds carelessly.

    directory/model/        Qwen2 of 0.6 M parameters, character tokenizer; an ordinary Hugging Face directory
    directory/train.jsonl   {"prompt": "12+34=", "answer": "46"}
    directory/test.jsonl    sums that the training file has in neither order
    directory/build.json    the settings; a second request with the same settings returns immediately

The supervised warm-up trains on sums of which two in three forget every carry. With greedy decoding the model
is then right if there is nothing to carry, in less than a third of the held-out sums. It has both habits, and
reinforcement learning finds the one that is rewarded. One seed gives the same weights on the same machine.
That of seed 0 is shipped, see asyncrl/quickstart/shipped.py.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from asyncrl.quickstart.shipped import found
from asyncrl.quickstart.tiny import EOS, IGNORED, PAD, Size, make_model, make_tokenizer, train_on
from asyncrl.run.directory import write_directory

Row = dict[str, str]
CHARACTERS = "0123456789+="


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSettings(Size):
    """Everything that the model depends on."""

    test_rows: int = 512
    correct_share: float = 0.35  # share of correct sums in the warm-up; the others forget the carries

    @property
    def digest(self) -> str:
        """Identifies the build; the leading number changes with the recipe."""
        return hashlib.sha256(json.dumps([2, asdict(self)], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupResult:
    """Where the quick-start model is, and its accuracy."""

    model: Path
    train: Path
    test: Path
    accuracy: float  # of greedy decoding on all held-out sums


def build(directory: Path, settings: WarmupSettings, report: Callable[[str], None]) -> WarmupResult:
    """Make model and data unless they exist, in about a minute; `report` gets lines. Raises RunError."""
    if (built := found(directory, settings.digest, report)) is not None:
        return _result(directory, built)
    report(f"making the quick-start model in {directory}: about a minute, once")
    train, test = split_sums(settings.seed, settings.test_rows)
    with write_directory(directory) as writing:
        for name, rows in (("train", train), ("test", test)):
            (writing / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        built = {"digest": settings.digest} | _warm_up(settings, train, test, writing / "model", report)
        (writing / "build.json").write_text(json.dumps(built | {"settings": asdict(settings)}, indent=1))
    return _result(directory, built)


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


def greedy_accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]
) -> float:
    """Return the share of rows that the model answers correctly with greedy decoding."""
    tokens_BT, labels_BT = _encode(tokenizer, rows)
    with torch.no_grad():
        # Greedy decoding gives the answer if and only if each token is the argmax after its true prefix.
        best_BT = model(input_ids=tokens_BT).logits[:, :-1].argmax(-1)
    wanted_BT = labels_BT[:, 1:]
    return float(((best_BT == wanted_BT) | (wanted_BT == IGNORED)).all(-1).float().mean())


def _warm_up(
    settings: WarmupSettings,
    train: Sequence[Row],
    test: Sequence[Row],
    target: Path,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Train, save model and tokenizer in `target`, and return the accuracy of the saved model."""
    tokenizer, model = make_tokenizer(CHARACTERS), make_model(settings, CHARACTERS)

    def judged() -> str:
        return f", held-out accuracy {greedy_accuracy(model, tokenizer, test):.0%}"

    train_on(model, _batches(tokenizer, train, settings), settings, report, judged)
    model.half().float()
    accuracy = greedy_accuracy(model, tokenizer, test)
    model.half().save_pretrained(target)  # half the size
    tokenizer.save_pretrained(target)
    return {"accuracy": accuracy}


def _batches(
    tokenizer: PreTrainedTokenizerFast, train: Sequence[Row], settings: WarmupSettings
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens_BT, labels_BT) of random sums, of which `correct_share` are correct."""
    careless = [{"prompt": row["prompt"], "answer": careless_sum(row["prompt"])} for row in train]
    # One table of correct and then careless answers, so that they have the same padding.
    tokens_NT, labels_NT = _encode(tokenizer, [*train, *careless])
    draw = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        index_B = torch.randint(len(train), (settings.batch,), generator=draw)
        is_careless_B = torch.rand(settings.batch, generator=draw) >= settings.correct_share
        chosen_B = index_B + is_careless_B * len(train)
        yield tokens_NT[chosen_B], labels_NT[chosen_B]


def _encode(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Return (tokens_BT, labels_BT): prompt, answer, <eos>, padding; only answer and <eos> have labels."""
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    answers = [[*tokenizer(row["answer"], add_special_tokens=False)["input_ids"], EOS] for row in rows]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens_BT = torch.full((len(rows), longest), PAD)
    labels_BT = torch.full((len(rows), longest), IGNORED)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens_BT[i, :end] = torch.tensor(prompt + answer)
        labels_BT[i, len(prompt) : end] = torch.tensor(answer)
    return tokens_BT, labels_BT


def _result(directory: Path, built: dict[str, Any]) -> WarmupResult:
    model, train, test = (directory / name for name in ("model", "train.jsonl", "test.jsonl"))
    return WarmupResult(model=model, train=train, test=test, accuracy=built["accuracy"])
