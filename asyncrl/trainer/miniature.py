"""Whether the learner computes what transformers computes, found from a model's config, without its weights.

A miniature has the code of the model: its config, with few and narrow layers, and random weights that are so
large that every layer matters. It runs packed sequences as the learner does, and each sequence alone as
transformers does. Rounding makes them differ by less than 0.001 nats. If a layer carries something else than
plain attention from token to token, they differ by nats.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, logging

from asyncrl.errors import ConfigError
from asyncrl.trainer.attention import SEGMENTS
from asyncrl.trainer.loading import without_dropout
from asyncrl.trainer.policy import PLAIN, PolicyModule, packed_logprobs, plain_logprobs

LAYERS, LAST_SPECIAL, VOCABULARY = 8, 2, 128
CPU = torch.device("cpu")
LENGTHS = (23, 37, 50)
# All widths are divided by the same factor, so that products of a width and a number of heads still agree.
FACTORS = (32, 16, 8, 4, 2, 1)
WIDTH = re.compile(r"(.+_)?(size|dim|rank|d_model|d_head|d_ff|n_embd|n_inner|d_state|width|d_inner)")
NO_WIDTH = re.compile(r".*(vocab|window|chunk|block|kernel|group|batch|patch|image|context).*")
# What other numbers become, if they are larger: by the name in the config.
DEPTH = re.compile(r"num_hidden_layers|n_layers?|num_layers")
CEILINGS = {
    re.compile(r"vocab_size"): VOCABULARY,
    re.compile(r".*_token_id"): LAST_SPECIAL,
    re.compile(r".*(experts_per_tok|top_k|topk)"): 2,
    re.compile(r".*experts"): 16,
    re.compile(r"(mamba_)?chunk_size"): 16,
}
MOST_PARAMETERS = 1 << 26
# Nats. Rounding gives up to 0.007, and the smallest fault of 60 architectures 0.6.
AGREES = 0.05


def require_agreement(config: Any) -> float | None:
    """Return the largest difference in nats; None for a model that has no miniature.

    `config` is Hugging Face's. The first probe judges each model again, with its weights. Raises ConfigError.
    """
    text = config.get_text_config()
    with torch.no_grad(), torch.random.fork_rng(devices=()), ExitStack() as stack:
        # Transformers would speak of odd sizes and slow kernels.
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        small = _miniature(text)
        if small is None:
            return None
        draw = torch.Generator().manual_seed(0)
        sequences = [
            torch.randint(LAST_SPECIAL + 1, VOCABULARY, (n,), generator=draw).tolist() for n in LENGTHS
        ]
        plain = _built(small, PLAIN)
        expected = [plain_logprobs(plain, ids, CPU) for ids in sequences]
        try:
            packed = without_dropout(_built(small, SEGMENTS)).train()
            found = packed_logprobs(PolicyModule(packed), sequences, CPU, chunk=VOCABULARY)
        except ConfigError:
            # Flash attention has soft caps and sinks, and only runs on the learner's GPU.
            if is_flash_attn_2_available() or is_flash_attn_3_available():
                return None
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"model: the code of {text.model_type} does not run on packed sequences, which the learner "
                f"trains on ({type(error).__name__}: {reason}); choose a model with plain causal attention"
            ) from error
        apart = [float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)]
        if max(apart) <= AGREES:
            return max(apart)
        where = _first_to_differ(packed, plain, sequences, apart.index(max(apart)))
    raise ConfigError(
        f"model: the learner would compute other log-probabilities than transformers for "
        f"{text.model_type}, in a small random model by {max(apart):.2g} nats: {where}; "
        "choose a model with plain causal attention"
    )


def _miniature(text: Any) -> Any | None:
    """Return the config of the narrowest model that transformers can run; None if it can run none."""
    all_layers = getattr(text, "num_hidden_layers", 0)
    for layers, factor in product((LAYERS, all_layers), FACTORS):
        try:
            shrink = partial(_smaller, factor=factor, layers=layers, of=all_layers)
            values = {key: shrink(key, value) for key, value in text.to_dict().items()}
            small = type(text)(**values)
            with torch.device("meta"):
                parameters = AutoModelForCausalLM.from_config(deepcopy(small)).num_parameters()
            if parameters <= MOST_PARAMETERS:
                plain_logprobs(_built(small, PLAIN), range(LAST_SPECIAL + 1, VOCABULARY), CPU)
                return small
        except Exception:  # noqa: BLE001 - an architecture's own code raises anything
            continue
    return None


def _smaller(key: str, value: Any, *, factor: int, layers: int, of: int) -> Any:
    """Return the value that a key of a config has in a miniature with so many of its layers."""
    if isinstance(value, Mapping):
        return {
            name: _smaller(str(name), one, factor=factor, layers=layers, of=of) for name, one in value.items()
        }
    if isinstance(value, list) and len(value) == of:
        return value[:layers]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if value == of and DEPTH.fullmatch(key):
        return min(value, layers)
    for name, most in CEILINGS.items():
        if name.fullmatch(key):
            return min(value, most)
    is_width = WIDTH.fullmatch(key) and not NO_WIDTH.fullmatch(key) and value % factor == 0
    return value // factor if is_width else value


def _built(small: Any, attention: str) -> Any:
    """Return a model whose weights are the same in every call, each matrix with outputs of about 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(small), attn_implementation=attention).float().eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def _first_to_differ(packed: Any, plain: Any, sequences: Sequence[Sequence[int]], index: int) -> str:
    """Name the first module whose inputs agree and whose outputs differ, for one of the sequences."""
    start = sum(map(len, sequences[:index]))
    part = slice(start, start + len(sequences[index]))
    total = sum(map(len, sequences))
    with _recorded(packed.base_model, total) as together:
        packed_logprobs(PolicyModule(packed), sequences, CPU, chunk=VOCABULARY)
    with _recorded(plain.base_model, len(sequences[index])) as by_itself:
        plain_logprobs(plain, sequences[index], CPU)
    for name, (inputs, outputs) in together.items():
        own_inputs, own_outputs = by_itself.get(name, ([], []))
        if own_inputs and _agree(inputs, own_inputs, part) and not _agree(outputs, own_outputs, part):
            kind = type(packed.base_model.get_submodule(name)).__name__
            return f"layer {name} ({kind}) is the first to differ"
    return "the logits differ behind the last layer"


@contextmanager
def _recorded(backbone: nn.Module, tokens: int) -> Iterator[dict[str, tuple[list[Tensor], list[Tensor]]]]:
    """Yield what goes into each module and comes out of it, per token, in the order in which they finish."""
    calls: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def per_token(values: Any) -> list[Tensor]:
        values = values if isinstance(values, tuple | list) else (values,)
        return [one for one in values if isinstance(one, Tensor) and one.shape[:2] == (1, tokens)]

    def record(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls[name] = (per_token([*args, *kwargs.values()]), per_token(output))

        return hook

    modules = [(name, module) for name, module in backbone.named_modules() if name]
    handles = [module.register_forward_hook(record(name), with_kwargs=True) for name, module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _agree(packed: Sequence[Tensor], alone: Sequence[Tensor], part: slice) -> bool:
    pairs = [(one[:, part], other) for one, other in zip(packed, alone, strict=False)]
    return all(
        torch.allclose(one, other, rtol=AGREES, atol=AGREES)
        for one, other in pairs
        if one.shape == other.shape
    )
