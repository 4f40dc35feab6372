"""Log-probabilities of whole sequences: packed as the learner trains them, and by transformers, each alone.

Axes in names:  N packed tokens, T predicted tokens, K those at the end of a sequence, V vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from asyncrl.trainer.attention import of_text

# Transformers implements every attention in this way, with windows, soft caps and sinks.
PLAIN = "eager"
# Tokens of a long sequence that are compared, its last ones: logits of all of them might not fit the GPU.
COMPARED = 64


def packed_logprobs(
    policy: Any, sequences: Sequence[Sequence[int]], device: torch.device, *, chunk: int
) -> list[Tensor]:
    """Return the log-probabilities of `ids[1:]` of each sequence, all in one pack."""
    lengths = [len(ids) for ids in sequences]
    ids_N = torch.tensor([token for ids in sequences for token in ids], device=device)
    positions_N = torch.cat([torch.arange(length, device=device) for length in lengths])
    predicted_T = positions_N.nonzero()[:, 0]
    columns_RT: Tensor = policy(
        input_ids_N=ids_N,
        position_ids_N=positions_N,
        sequence_starts=tuple(accumulate(lengths, initial=0)),
        source_T=predicted_T - 1,
        target_T=ids_N[predicted_T],
        temperature=1.0,
        chunk=chunk,
    )
    return list(torch.split(columns_RT[0], [length - 1 for length in lengths]))


def plain_logprobs(model: Any, ids: Sequence[int], device: torch.device) -> Tensor:
    """Return those of the last `COMPARED` tokens of one sequence, by the model's own code in eval mode."""
    ids_1N = torch.tensor([ids], device=device)
    kept = min(len(ids) - 1, COMPARED)
    few = "logits_to_keep" in inspect.signature(model.forward).parameters
    with _plain(model):
        logits_1NV = model(
            input_ids=ids_1N, use_cache=False, **({"logits_to_keep": kept + 1} if few else {})
        ).logits
    logprobs_KV: Tensor = logits_1NV[0, -kept - 1 : -1].float().log_softmax(-1)
    return logprobs_KV.gather(-1, ids_1N[0, -kept:, None])[:, 0]


@contextmanager
def _plain(model: Any) -> Iterator[None]:
    """Let a model run as transformers alone would run it."""
    of_learner, is_training = model.config._attn_implementation, model.training
    model.eval()
    model.set_attn_implementation(of_text(model.config, PLAIN))
    try:
        yield
    finally:
        model.set_attn_implementation(of_text(model.config, of_learner))
        model.train(is_training)
