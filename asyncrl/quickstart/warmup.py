"""Makes the quick-start model: a tiny transformer that adds carelessly.

    directory/model/        Qwen2 of 0.6 M parameters, character tokenizer; an ordinary Hugging Face directory
    directory/train.jsonl   {"prompt": "12+34=", "answer": "46"}
    directory/test.jsonl    sums that the training file has in neither order
    directory/build.json    the settings; a second request with the same settings returns immediately

The supervised warm-up trains on sums of which two in three forget every carry. With greedy decoding the model
is then right if there is nothing to carry, in less than a third of the held-out sums. It has both habits, and
reinforcement learning finds the one that is rewarded. One seed gives the same weights on the same machine.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from asyncrl.errors import RunError
from asyncrl.run.directory import write_directory

Row = dict[str, str]
PAD, BOS, EOS = 0, 1, 2
SPECIALS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789+="
IGNORED = -100  # label of tokens outside the answer, which torch's cross-entropy ignores


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSettings:
    """Everything that the model depends on."""

    seed: int = 0
    layers: int = 3
    hidden: int = 128
    heads: int = 4  # head size 32, the smallest that vLLM's CPU attention supports
    intermediate: int = 384
    # About 1 / sqrt(hidden). With the usual 0.02, a model this small starts to learn three times later.
    initializer_range: float = 0.08
    test_rows: int = 512
    correct_share: float = 0.35  # share of correct sums in the warm-up; the others forget the carries
    lr: float = 1e-3  # rises for `lr_rise` steps, then falls linearly to 0
    lr_rise: int = 20
    batch: int = 128
    steps: int = 500
    report_every: int = 50

    @property
    def digest(self) -> str:
        """Identifies the build; the leading number changes with the recipe."""
        return hashlib.sha256(json.dumps([1, asdict(self)], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupResult:
    """Where the quick-start model is, and its accuracy."""

    model: Path
    train: Path
    test: Path
    accuracy: float  # of greedy decoding on all held-out sums


def build(directory: Path, settings: WarmupSettings, report: Callable[[str], None]) -> WarmupResult:
    """Make model and data unless they exist, in about a minute; `report` gets lines. Raises RunError."""
    record = directory / "build.json"
    if record.is_file() and (built := json.loads(record.read_text()))["digest"] == settings.digest:
        report(f"the quick-start model is ready in {directory}: held-out accuracy {built['accuracy']:.0%}")
        return _result(directory, built)
    if directory.exists() and not record.is_file():
        raise RunError(f"{directory} exists without a quick-start model; remove it or name another directory")
    report(f"making the quick-start model in {directory}: about a minute, once")
    train, test = split_sums(settings.seed, settings.test_rows)
    with write_directory(directory) as writing:
        for name, rows in (("train", train), ("test", test)):
            (writing / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        threads = torch.get_num_threads()
        # More threads slow a model this small down, and their number would change the result.
        torch.set_num_threads(1)
        try:
            built = {"digest": settings.digest} | _warm_up(settings, train, test, writing / "model", report)
        finally:
            torch.set_num_threads(threads)
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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character and <bos> in front of every text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    marks = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **marks)


def build_model(settings: WarmupSettings) -> Qwen2ForCausalLM:
    """Make a model initialised from the seed."""
    torch.manual_seed(settings.seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(SPECIALS) + len(CHARACTERS),
            hidden_size=settings.hidden,
            intermediate_size=settings.intermediate,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads // 2,
            max_position_embeddings=64,
            initializer_range=settings.initializer_range,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            dtype=torch.float32,
        )
    )


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
    """Train, save model and tokenizer in `target`, and return accuracy and seconds."""
    started_at_s = time.monotonic()
    tokenizer, model = build_tokenizer(), build_model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min(1.0, (done + 1) / settings.lr_rise) * (1.0 - done / settings.steps)
    )
    accuracy = 0.0
    for step, (tokens_BT, labels_BT) in enumerate(_batches(tokenizer, train, settings), start=1):
        loss = model(input_ids=tokens_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % settings.report_every == 0 or step == settings.steps:
            accuracy, seconds = greedy_accuracy(model, tokenizer, test), time.monotonic() - started_at_s
            report(
                f"warm-up step {step}/{settings.steps}: loss {loss.item():.3f}, held-out accuracy "
                f"{accuracy:.0%}, {seconds:.0f} s"
            )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return {"accuracy": accuracy, "seconds": round(time.monotonic() - started_at_s, 1)}


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
