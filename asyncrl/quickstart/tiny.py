"""Models of half a million parameters with a token per character, and their supervised warm-up."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ("<pad>", "<bos>", "<eos>")
IGNORED = -100  # label of tokens outside the answer, which torch's cross-entropy ignores
POSITIONS = 64  # longest text, in tokens


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


def make_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character and <bos> in front of every text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    marks = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **marks)


def make_model(size: Size, characters: str) -> Qwen2ForCausalLM:
    """Make a model initialised from the seed."""
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
    model: Qwen2ForCausalLM,
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
