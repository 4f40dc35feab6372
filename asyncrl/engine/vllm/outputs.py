"""From vLLM's outputs to rollouts: pure, so that every assumption about them is checked in one place."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ResultError
from asyncrl.lineage import Weights
from asyncrl.types import Rollout, VersionSpan


def to_rollout(prompt_ids: Sequence[int], completion: Any) -> Rollout:
    """One finished `vllm.CompletionOutput` as an unscored rollout. The token that ended it is part of the response.

    Raises:
        ResultError: it did not end by itself, or tokens lack a version or a log-probability.
    """
    if completion.finish_reason not in ("stop", "length"):
        raise ResultError(f"vLLM ended a request with {completion.finish_reason!r}; only stop and length give a rollout")
    response_ids = np.array(completion.token_ids, dtype=np.int32)
    return Rollout(
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        response_ids=response_ids,
        action_mask=np.ones(len(response_ids), dtype=np.bool_),
        behaviour_logprobs=token_logprobs(completion.logprobs, completion.token_ids),
        version_spans=_version_spans(completion.weight_versions, len(response_ids)),
        finish_reason=completion.finish_reason,
    )


def token_logprobs(flat: Any, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Log-probability of each token from `vllm.logprobs.FlatLogprobs`; NaN where vLLM gives none (the first of a prompt)."""
    if flat is None or len(flat.start_indices) != len(token_ids):
        found = 0 if flat is None else len(flat.start_indices)
        raise ResultError(f"vLLM gave {found} log-probabilities for {len(token_ids)} tokens; one each is needed")
    logprobs = np.full(len(token_ids), np.nan, dtype=np.float32)
    for position, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        if end > start:  # the token itself comes first, before any top ones
            if flat.token_ids[start] != token_ids[position]:
                raise ResultError(
                    f"vLLM's log-probability {position} is of token {flat.token_ids[start]}, not {token_ids[position]}"
                )
            logprobs[position] = flat.logprobs[start]
    return logprobs


def label(weights: Weights) -> str:
    """What vLLM calls these weights, and so every token that they sample."""
    return f"{weights.version} {weights.lineage}"


def _version_spans(spans: Any, tokens: int) -> tuple[VersionSpan, ...]:
    if sum(span.end - span.start for span in spans or ()) != tokens:
        raise ResultError(f"vLLM gave no weight version for some of {tokens} tokens: {spans}")
    found = []
    for span in spans or ():
        if span.end > span.start:
            version, lineage = map(int, span.version.split())
            found.append(VersionSpan(version, span.end - span.start, lineage))
    return tuple(found)
