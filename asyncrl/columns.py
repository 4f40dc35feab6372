"""The columns of a group: one table, which encoding, decoding, checks and training samples follow.

A new column is one line of `COLUMNS`, and the code that fills it. For instance:

    "image_features": Column(np.float32, ("images", "width"), optional=True),

The first axis of a column says whose entries they are:

    prompt_tokens, response_tokens   of a token: an attribute of `Rollout`, or, if the column is optional, an
                                     entry of `Rollout.recorded`; recorded columns of response tokens reach
                                     the loss in `TokenBatch.recorded`
    tokens                           of a token of prompt and response, one after the other: an entry of
                                     `Rollout.recorded`
    rollouts, spans, turns,          of a rollout, a version span, a turn, an answer's byte, an episode:
    answer_bytes, episodes           `wire/group_frames.py` fills them
    kept_counts                      of a token that a response token could have been: an entry of
                                     `Rollout.recorded`
    any other name                   of the prompt: an entry of `Group.recorded`

If an axis has the name of a column, that column counts the entries of each rollout, which lie one after the
other; `kept_counts` counts those of each response token. Other axes have the same size in the whole group;
those behind the first axis of a recorded column, in the whole run (`GroupLimits.sizes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Log-probabilities of a teacher in scorer processes, in place of the reference that the learner measures.
TEACHER = "teacher_logprobs"
# In the column of counts, of a rollout without an answer or without turns; also of a token without experts.
NONE = -1
# The axis of prompt and response together.
TOKENS = "tokens"
# The recorded column of what routers chose for each token.
EXPERTS = "routed_experts"
# The tokens that `sampling.top_k`, `top_p` and `min_p` left to choose from, where these are set: how many for
# each response token, 0 where the policy did not sample, and their ids.
KEPT_COUNTS, KEPT_IDS = "kept_counts", "kept_ids"


@dataclass(frozen=True, slots=True)
class Column:
    """What a column holds."""

    dtype: type[np.generic]
    axes: tuple[str, ...]
    # Whether a group may lack it. Otherwise it may not, unless the column that counts its axis is missing.
    optional: bool = False
    # Entry of a rollout that lacks the column in a group that has it. NaN: entries may be NaN, as "none".
    default: float = 0
    least: int | None = None  # the lowest value, of counts
    # Values are `NONE`, or number something of which there are so many: a name in `GroupLimits.sizes`.
    below: str | None = None


COLUMNS = {
    "prompt_tokens": Column(np.int32, ("rollouts",), least=0),
    "response_tokens": Column(np.int32, ("rollouts",), least=0),
    "spans": Column(np.int32, ("rollouts",), least=0),
    "answer_bytes": Column(np.int32, ("rollouts",), least=NONE),
    "turns": Column(np.int32, ("rollouts",), least=NONE, optional=True),
    "finish": Column(np.uint8, ("rollouts",)),
    "rewards": Column(np.float64, ("rollouts",)),
    "reward_parts": Column(np.float64, ("rollouts", "parts"), default=np.nan),
    "episode_of": Column(np.int32, ("rollouts",), optional=True),
    "prompt_ids": Column(np.int32, ("prompt_tokens",)),
    "response_ids": Column(np.int32, ("response_tokens",)),
    "action_mask": Column(np.bool_, ("response_tokens",)),
    "behaviour_logprobs": Column(np.float32, ("response_tokens",)),
    "span_versions": Column(np.int64, ("spans",)),
    "span_lineages": Column(np.int64, ("spans",)),
    "span_tokens": Column(np.int32, ("spans",), least=0),
    TEACHER: Column(np.float32, ("response_tokens",), optional=True, default=np.nan),
    "answers": Column(np.uint8, ("answer_bytes",)),
    "turn_ends": Column(np.int32, ("turns",)),
    "turn_rewards": Column(np.float32, ("turns",), optional=True),
    "turn_states": Column(np.uint64, ("turns",), optional=True),
    "turn_order": Column(np.int32, ("turns",), optional=True),
    EXPERTS: Column(np.int16, (TOKENS, "layers", "top_k"), optional=True, default=NONE, below="experts"),
    KEPT_COUNTS: Column(np.int32, ("response_tokens",), optional=True, least=0),
    KEPT_IDS: Column(np.int32, (KEPT_COUNTS,), below="token_ids"),
    "image_digests": Column(np.uint64, ("images",), optional=True),
    "judgements": Column(np.uint8, ("judgement_bytes",), optional=True),
    "episode_metrics": Column(np.float32, ("episodes", "metrics"), optional=True, default=np.nan),
}


def of_prompt(name: str) -> bool:
    """Whether groups record the column for their prompt."""
    return name in COLUMNS and COLUMNS[name].axes[0] not in ("rollouts", "episodes", TOKENS, *COLUMNS)


def of_token(name: str) -> bool:
    """Whether rollouts record the column for their tokens."""
    column, axes = COLUMNS.get(name), ("prompt_tokens", "response_tokens", TOKENS)
    return name == KEPT_IDS or (column is not None and column.optional and column.axes[0] in axes)


def filled(name: str, pieces: Sequence[NDArray[Any] | None], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """Return the column's pieces with its default in place of None; no pieces if all are None.

    Raises ValueError for a piece that does not have one entry for each of its `lengths`.
    """
    column = COLUMNS[name]
    given = [piece for piece in pieces if piece is not None]
    if not given:
        return []
    whole: list[NDArray[Any]] = []
    for piece, length in zip(pieces, lengths, strict=True):
        shape = (length, *given[0].shape[1:])
        whole.append(np.full(shape, column.default, column.dtype) if piece is None else piece)
        if whole[-1].shape != shape:
            raise ValueError(f"{name} has the shape {whole[-1].shape}; {shape} is needed")
    return whole
