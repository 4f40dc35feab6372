"""Rollouts from vLLM's outputs: pure functions that check every assumption about these outputs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.columns import KEPT_COUNTS, KEPT_IDS
from asyncrl.errors import ResultError
from asyncrl.lineage import Weights
from asyncrl.types import Rollout, VersionSpan

# Share of the probability by which the tokens that could have been sampled may miss 1 by rounding.
_ROUNDING = 1e-3


def to_rollout(prompt_ids: Sequence[int], completion: Any, is_truncated: bool = False) -> Rollout:
    """A finished `vllm.CompletionOutput` as an unscored rollout, whose response includes the end token.

    If it `is_truncated`, the most probable tokens of each place become the tokens that were kept there.
    Raises ResultError: the request was aborted, or a token lacks its version or log-probability.
    """
    if completion.finish_reason not in ("stop", "length"):
        ended = f"vLLM ended a request with {completion.finish_reason!r}"
        raise ResultError(f"{ended}; only stop and length give a rollout")
    response_ids = np.array(completion.token_ids, dtype=np.int32)
    spans = completion.weight_versions or ()
    if sum(span.end - span.start for span in spans) != len(response_ids):
        raise ResultError(f"vLLM gave no weight version for some of {len(response_ids)} tokens: {spans}")
    return Rollout(
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        response_ids=response_ids,
        action_mask=np.ones(len(response_ids), dtype=np.bool_),
        behaviour_logprobs=token_logprobs(completion.logprobs, completion.token_ids),
        version_spans=tuple(
            VersionSpan(version, span.end - span.start, lineage)
            for span in spans
            if span.end > span.start
            for version, lineage in [map(int, span.version.split())]
        ),
        finish_reason=completion.finish_reason,
        recorded=kept_tokens(completion.logprobs) if is_truncated else {},
    )


def token_logprobs(flat: Any, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """[T]: log-probabilities from `vllm.logprobs.FlatLogprobs`; NaN for a prompt's first token."""
    if (found := 0 if flat is None else len(flat.start_indices)) != len(token_ids):
        gave = f"vLLM gave {found} log-probabilities for {len(token_ids)} tokens"
        raise ResultError(f"{gave}; one each is needed")
    logprobs = np.full(len(token_ids), np.nan, dtype=np.float32)
    for position, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        if end > start:  # the token itself comes before the most probable ones
            if flat.token_ids[start] != token_ids[position]:
                given = f"vLLM's log-probability {position} is of token {flat.token_ids[start]}"
                raise ResultError(f"{given}, not {token_ids[position]}")
            logprobs[position] = flat.logprobs[start]
    return logprobs


def kept_tokens(flat: Any) -> dict[str, NDArray[np.int32]]:
    """The columns of kept tokens: those with a finite log-probability among the most probable.

    Raises ResultError if these are not all, as where more tokens than `top_k` are equally probable.
    """
    starts, logprobs = np.array(flat.start_indices), np.array(flat.logprobs, dtype=np.float64)
    is_kept = np.isfinite(logprobs)
    is_kept[starts] = False  # the token itself comes before the most probable ones, and among them again
    total = np.add.reduceat(np.where(is_kept, np.exp(logprobs), 0.0), starts)
    if (lacking := np.abs(total - 1.0).max()) > _ROUNDING:
        raise ResultError(
            f"vLLM's most probable tokens lack {lacking:.2g} of the probability that a token was sampled "
            "from, as where more than top_k are equally probable; such a response cannot be trained"
        )
    counts = np.add.reduceat(is_kept, starts, dtype=np.int32)
    return {KEPT_COUNTS: counts, KEPT_IDS: np.array(flat.token_ids, dtype=np.int32)[is_kept]}


def label(weights: Weights) -> str:
    """The name of these weights in vLLM, which returns it with every token that they sample."""
    return f"{weights.version} {weights.lineage}"
