"""The quick-start model: a tiny transformer that has half learned two-digit addition, made on the spot.

    directory/model/        Qwen2 of 0.6 M parameters, character tokenizer; an ordinary Hugging Face directory
    directory/train.jsonl   {"prompt": "12+34=", "answer": "46"}
    directory/test.jsonl    sums that the training file has in neither order
    directory/build.json    what it was made from; an identical request finds it and returns at once

A short supervised warm-up stops at about one third of the held-out sums: there is signal in most groups, and
most of the way is left to reinforcement learning. Same seed, same machine: same weights.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from asyncrl.errors import RunError

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789+="
IGNORED = -100
"""Label of tokens that are no answer, as torch's cross-entropy knows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSettings:
    """Everything the result depends on."""

    seed: int = 0
    layers: int = 3
    hidden: int = 128
    heads: int = 4
    """Head size 32: the smallest that vLLM's CPU attention takes."""
    intermediate: int = 384
    test_rows: int = 512
    lr: float = 7e-4
    batch: int = 256
    target_accuracy: float = 0.33
    check_every: int = 5
    max_steps: int = 3000

    @property
    def digest(self) -> str:
        """Names the build; the leading number changes with the recipe."""
        return hashlib.sha256(json.dumps([1, asdict(self)], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupResult:
    """Where the quick-start model is and what it can do."""

    model: Path
    train: Path
    test: Path
    accuracy: float
    """Greedy, on all held-out sums."""
    steps: int
    seconds: float


def build_quickstart(
    directory: Path, settings: WarmupSettings | None = None, *, report: Callable[[str], None] = lambda _: None
) -> WarmupResult:
    """The quick-start model and data in `directory`; made unless they are there already. About a minute on two cores."""
    settings = settings or WarmupSettings()
    record = directory / "build.json"
    if record.is_file() and (built := json.loads(record.read_text()))["digest"] == settings.digest:
        report(f"quick-start model is ready in {directory} (held-out accuracy {built['accuracy']:.0%})")
        return _result(directory, built)
    report(f"making the quick-start model in {directory}: about a minute, once")
    scratch = directory.with_name(directory.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    train, test = split_sums(settings.seed, settings.test_rows)
    for name, rows in (("train", train), ("test", test)):
        (scratch / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = {"digest": settings.digest} | _warm_up(settings, train, test, scratch / "model", report)
    (scratch / "build.json").write_text(json.dumps(built | {"settings": asdict(settings)}, indent=1))
    shutil.rmtree(directory, ignore_errors=True)
    scratch.rename(directory)
    return _result(directory, built)


def split_sums(seed: int, test_rows: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(train, test): all sums of two two-digit numbers, cut so that a+b and b+a are on the same side."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
    sides: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
    for a, b in (pairs[index] for index in order):
        held_out = len(sides[1]) < test_rows
        for x, y in {(a, b), (b, a)}:
            sides[held_out].append({"prompt": f"{x}+{y}=", "answer": str(x + y)})
    return sides[0], sides[1][:test_rows]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, <bos> in front of every text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=64
    )


def build_model(settings: WarmupSettings) -> Qwen2ForCausalLM:
    """Freshly initialised from the seed."""
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
            tie_word_embeddings=False,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            dtype=torch.float32,
        )
    )


def greedy_accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[dict[str, str]]) -> float:
    """Share of rows whose answer is what the model finds most likely at every step."""
    tokens_BT, labels_BT = _encode(tokenizer, rows)
    with torch.no_grad():
        # Greedy decoding gives the answer exactly if every answer token is the argmax after its true prefix.
        best_BT = model(input_ids=tokens_BT).logits[:, :-1].argmax(-1)
    wanted_BT = labels_BT[:, 1:]
    return ((best_BT == wanted_BT) | (wanted_BT == IGNORED)).all(-1).float().mean().item()


def _warm_up(
    settings: WarmupSettings,
    train: Sequence[dict[str, str]],
    test: Sequence[dict[str, str]],
    target: Path,
    report: Callable[[str], None],
) -> dict[str, float]:
    """Train until the target accuracy, save model and tokenizer in `target`; returns accuracy, steps, seconds."""
    started_at_s = time.monotonic()
    tokenizer, model = build_tokenizer(), build_model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    tokens_BT, labels_BT = _encode(tokenizer, train)
    for step, index_B in enumerate(_batches(len(train), settings), start=1):
        loss = model(input_ids=tokens_BT[index_B], labels=labels_BT[index_B]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % settings.check_every:
            continue
        accuracy = greedy_accuracy(model, tokenizer, test)
        seconds = time.monotonic() - started_at_s
        report(f"warm-up step {step}: loss {loss.item():.3f}, held-out accuracy {accuracy:.1%}, {seconds:.0f} s")
        if accuracy >= settings.target_accuracy:
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
            return {"accuracy": accuracy, "steps": step, "seconds": round(seconds, 1)}
    raise RunError(
        f"quick-start warm-up: held-out accuracy is still below {settings.target_accuracy:.0%} after {settings.max_steps} steps; "
        "try another seed"
    )


def _batches(rows: int, settings: WarmupSettings) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.max_steps):
        yield torch.randint(rows, (settings.batch,), generator=draw)


def _encode(tokenizer: PreTrainedTokenizerFast, rows: Sequence[dict[str, str]]) -> tuple[Tensor, Tensor]:
    """(tokens_BT, labels_BT): prompt, answer, <eos>, padding; only answer and <eos> have labels."""
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


def _result(directory: Path, built: dict[str, float]) -> WarmupResult:
    return WarmupResult(
        model=directory / "model",
        train=directory / "train.jsonl",
        test=directory / "test.jsonl",
        accuracy=built["accuracy"],
        steps=int(built["steps"]),
        seconds=built["seconds"],
    )
