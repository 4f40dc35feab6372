"""A rollout group as a frame: the columns of `columns.COLUMNS`, and a head with its other fields.

The entries of all rollouts lie one after the other in a column, as the columns of counts say.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.columns import COLUMNS, KEPT_COUNTS, KEPT_IDS, NONE, TOKENS, Column, filled, of_prompt, of_token
from asyncrl.errors import WireError
from asyncrl.types import Group, GroupTimes, Rollout, Turns, VersionSpan
from asyncrl.wire.codec import Arrays, Limits, MessageCodec, decode_frame, encode_frame

# A frame must fit into one value of Redis (512 MiB).
GROUP_LIMITS = Limits(
    kind=1, meta_bytes=1 << 16, body_bytes=(1 << 29) - (1 << 17), items=256, text_bytes=4096
)
# Bounds for one group. Rollouts and spans are counted: each is many times larger in memory than in a frame.
MAX_ROLLOUTS, MAX_SPANS, MAX_ANSWER_BYTES = 4096, 1 << 16, 1024
# A longer `dead_reason` is cut off.
REASON_CHARACTERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fields of a group that are not columns, and the names that columns refer to."""

    ticket_id: int
    generator_id: str
    finished_version: int
    sampling_s: float
    reward_s: float
    lane: str
    finish_reasons: tuple[str, ...]
    parts: tuple[str, ...]
    times: tuple[float, ...] | None = None
    greedy_reward: float | None = None
    dead_reason: str | None = None
    episode_metrics: tuple[str, ...] = ()
    missing: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.times is not None and len(self.times) != len(GroupTimes._fields):
            raise ValueError(f"times has {len(self.times)} numbers; three Unix times are needed")
        if self.greedy_reward is not None and not math.isfinite(self.greedy_reward):
            raise ValueError(f"greedy_reward is {self.greedy_reward}; a finite number is needed")


# `algo/trainable.py` judges the numbers.
_HEADS = MessageCodec((Head,), any_number=True)
# Fields that are the same in `Group`.
_SAME = (
    *("ticket_id", "generator_id", "finished_version", "sampling_s", "reward_s"),
    *("lane", "greedy_reward", "dead_reason", "missing"),
)


def encode_group(group: Group, key: bytes = b"") -> bytes:
    """Return one frame. Raises WireError for numbers that are not finite: they cannot be trained on."""
    rollouts = group.rollouts
    finish_reasons = sorted({rollout.finish_reason for rollout in rollouts})
    parts = sorted({part for rollout in rollouts for part in rollout.reward_parts})
    head = {
        "ticket_id": group.ticket_id,
        "generator_id": group.generator_id,
        "finished_version": group.finished_version,
        "sampling_s": float(group.sampling_s),
        "reward_s": float(group.reward_s),
        "lane": group.lane,
        "finish_reasons": finish_reasons,
        "parts": parts,
        "times": None if group.times is None else list(map(float, group.times)),
        "greedy_reward": None if group.greedy_reward is None else float(group.greedy_reward),
        "dead_reason": None if group.dead_reason is None else group.dead_reason[:REASON_CHARACTERS],
        "episode_metrics": list(group.episode_metrics) or None,
        "missing": dict(group.missing) or None,
    }
    head = {name: value for name, value in head.items() if value is not None}
    # The receiver checks it in the same way.
    _HEADS.made(Head, head)
    # In the column, NaN marks a part that a rollout does not have.
    if not all(math.isfinite(value) for rollout in rollouts for value in rollout.reward_parts.values()):
        raise WireError("the group has reward_parts that are not finite; every number of a rollout must be")
    try:
        arrays = _columns(group, finish_reasons, parts)
    except (ValueError, TypeError) as error:
        raise WireError(f"the group has a column that cannot be sent: {error}") from error
    _check_columns(arrays)
    return encode_frame(GROUP_LIMITS, head, arrays, key=key)


def _columns(group: Group, finish_reasons: list[str], parts: list[str]) -> Arrays:
    rollouts = group.rollouts
    spans = [span for rollout in rollouts for span in rollout.version_spans]
    answers = [
        None if rollout.answer is None else rollout.answer.encode("utf-8", "replace") for rollout in rollouts
    ]
    columns: dict[str, Any] = {
        "prompt_tokens": [len(rollout.prompt_ids) for rollout in rollouts],
        "response_tokens": [len(rollout.response_ids) for rollout in rollouts],
        "spans": [len(rollout.version_spans) for rollout in rollouts],
        "span_versions": [span.version for span in spans],
        "span_lineages": [span.lineage for span in spans],
        "span_tokens": [span.tokens for span in spans],
        "finish": [finish_reasons.index(rollout.finish_reason) for rollout in rollouts],
        "rewards": [rollout.reward for rollout in rollouts],
        "reward_parts": [[rollout.reward_parts.get(part, np.nan) for part in parts] for rollout in rollouts],
        "answer_bytes": [NONE if answer is None else len(answer) for answer in answers],
        "answers": np.frombuffer(b"".join(answer or b"" for answer in answers), dtype=np.uint8),
    }
    if group.episode_of is not None:
        columns["episode_of"] = group.episode_of
    if group.episode_metrics:
        columns["episode_metrics"] = np.stack(list(group.episode_metrics.values()), axis=1)
    arrays = {name: np.asarray(values, COLUMNS[name].dtype) for name, values in columns.items()}
    arrays["reward_parts"] = arrays["reward_parts"].reshape(len(rollouts), len(parts))
    unknown = [name for rollout in rollouts for name in rollout.recorded if not of_token(name)]
    unknown += [name for name in group.recorded if not of_prompt(name)]
    if unknown:
        raise ValueError(f"{unknown[0]} is not declared as recorded; add it to asyncrl/columns.py")
    return {**arrays, **_pieced_columns(rollouts, arrays), **group.recorded}


def _pieced_columns(rollouts: Sequence[Rollout], counts: Arrays) -> Arrays:
    """Return the columns of tokens and turns that the rollouts have; `counts` are those of their tokens."""
    played = [rollout.turns for rollout in rollouts if rollout.turns is not None]
    lengths = {axis: counts[axis].tolist() for axis in ("prompt_tokens", "response_tokens")}
    lengths[TOKENS] = [sum(both) for both in zip(*lengths.values(), strict=True)]
    arrays: Arrays = {}
    if any({KEPT_COUNTS, KEPT_IDS} & rollout.recorded.keys() for rollout in rollouts):
        lengths[KEPT_COUNTS] = [int(np.sum(rollout.recorded.get(KEPT_COUNTS, 0))) for rollout in rollouts]
    if played:
        lengths["turns"] = [len(turns.ends) for turns in played]
        turns = [NONE if rollout.turns is None else len(rollout.turns.ends) for rollout in rollouts]
        arrays["turns"] = np.array(turns, COLUMNS["turns"].dtype)
    for name, column in COLUMNS.items():
        axis = column.axes[0]
        if axis not in lengths:
            continue
        if axis == "turns":
            given = [getattr(turns, name.removeprefix("turn_")) for turns in played]
        elif of_token(name):
            given = [rollout.recorded.get(name) for rollout in rollouts]
        else:
            given = [getattr(rollout, name) for rollout in rollouts]
        pieces = filled(name, given, lengths[axis])
        if pieces or not column.optional:
            empty = np.empty(0, column.dtype)
            arrays[name] = np.concatenate(pieces or [empty], dtype=column.dtype, casting="same_kind")
    return arrays


def decode_group(data: bytes | bytearray, key: bytes | None = b"") -> Group:
    """The inverse of `encode_group`; arrays are read-only views. Raises WireError if it is not a group.

    `key=None` skips the checksum, for bytes that have passed it before.
    """
    meta, arrays = decode_frame(GROUP_LIMITS, data, key=key)
    head = _HEADS.made(Head, meta)
    _check_columns(arrays)
    metrics = arrays.get("episode_metrics", np.empty((0, 0), np.float32))
    try:
        return Group(
            rollouts=_rollouts(arrays, head),
            times=GroupTimes(*head.times) if head.times else None,
            episode_of=arrays.get("episode_of"),
            episode_metrics=dict(zip(head.episode_metrics, metrics.T, strict=True)),
            recorded={name: array for name, array in arrays.items() if of_prompt(name)},
            **{name: getattr(head, name) for name in _SAME},
        )
    except (ValueError, IndexError) as error:
        raise WireError(f"the columns of the group contradict each other: {error}") from error


def _check_columns(arrays: Arrays) -> None:
    """Compare the columns with the table, and with each other along their axes."""
    if unknown := arrays.keys() - COLUMNS.keys():
        raise WireError(f"the group has a tensor {min(unknown)!r:.80}; allowed are {', '.join(COLUMNS)}")
    sizes: dict[str, int] = {}
    for name, column in COLUMNS.items():
        axis, array = column.axes[0], arrays.get(name)
        # Without turns, for instance, there are no columns of them.
        lacks_axis = axis in COLUMNS and axis not in arrays
        if lacks_axis if array is not None else not (lacks_axis or column.optional):
            raise WireError(f"the group has tensors {', '.join(arrays)}; {name} and {axis} come together")
        if array is None:
            continue
        _check_values(name, column, array)
        for axis, size in zip(column.axes, array.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise WireError(
                    f"the columns of the group contradict each other: {name} has {size} {axis} instead of "
                    f"{sizes[axis]}"
                )
        if column.least is not None:
            sizes[name] = int(np.maximum(array, 0).sum(dtype=np.int64))
            sizes[TOKENS] = sizes["prompt_tokens"] + sizes.get("response_tokens", 0)
    _check_counts(arrays)


def _check_values(name: str, column: Column, array: NDArray[Any]) -> None:
    if array.dtype.type is not column.dtype or array.ndim != len(column.axes):
        raise WireError(
            f"the group has a tensor {name} of {array.dtype} with {array.ndim} axes; {column.dtype.__name__} "
            f"[{', '.join(column.axes)}] is needed"
        )
    if column.least is not None and array.min(initial=0) < column.least:
        raise WireError(f"the group has a negative count in {name}")
    if array.dtype.kind == "f":
        is_wrong = np.isinf(array) if math.isnan(column.default) else ~np.isfinite(array)
        if is_wrong.any():
            raise WireError(f"the group has {name} that are not finite; every number of a rollout must be")


def _check_counts(arrays: Arrays) -> None:
    rollouts, spans = len(arrays["rewards"]), len(arrays["span_tokens"])
    if rollouts > MAX_ROLLOUTS or spans > MAX_SPANS:
        raise WireError(
            f"the group has {rollouts} rollouts with {spans} version spans; at most {MAX_ROLLOUTS} and "
            f"{MAX_SPANS} are allowed"
        )
    most = arrays["answer_bytes"].max(initial=0)
    if most > MAX_ANSWER_BYTES:
        raise WireError(f"the group has an answer of {most} bytes; at most {MAX_ANSWER_BYTES} are allowed")


def _rollouts(arrays: Arrays, head: Head) -> tuple[Rollout, ...]:
    axes = {name: COLUMNS[name].axes[0] for name in arrays}
    counts = {axis: arrays[axis] for axis in set(axes.values()) if axis in arrays}
    if KEPT_COUNTS in counts:  # those of tokens become those of rollouts
        before = np.cumsum(np.append(0, counts[KEPT_COUNTS]))
        counts[KEPT_COUNTS] = np.diff(before[np.cumsum(arrays["response_tokens"])], prepend=0)
    slices = {axis: _slices(each) for axis, each in counts.items()}
    slices[TOKENS] = _slices(arrays["prompt_tokens"].astype(np.int64) + arrays["response_tokens"])
    recorded = {name: slices[axes[name]] for name in filter(of_token, arrays)}
    of_turns = {name.removeprefix("turn_"): arrays[name] for name in arrays if axes[name] == "turns"}
    spans = list(
        map(VersionSpan, *(arrays[f"span_{name}"].tolist() for name in ("versions", "tokens", "lineages")))
    )
    answers = arrays["answers"].tobytes()
    return tuple(
        Rollout(
            prompt_ids=arrays["prompt_ids"][prompt],
            response_ids=arrays["response_ids"][response],
            action_mask=arrays["action_mask"][response],
            behaviour_logprobs=arrays["behaviour_logprobs"][response],
            version_spans=tuple(spans[own_spans]),
            finish_reason=head.finish_reasons[finish],
            reward=reward,
            reward_parts={part: x for part, x in zip(head.parts, parts, strict=True) if x == x},
            answer=answers[answer].decode() if answer else None,
            turns=Turns(**{name: column[turns] for name, column in of_turns.items()}) if turns else None,
            recorded={name: arrays[name][pieces[r]] for name, pieces in recorded.items()},
        )
        for r, (prompt, response, own_spans, answer, turns, finish, reward, parts) in enumerate(
            zip(
                *(slices[axis] for axis in ("prompt_tokens", "response_tokens", "spans", "answer_bytes")),
                slices.get("turns", [None] * len(arrays["rewards"])),
                *(arrays[name].tolist() for name in ("finish", "rewards", "reward_parts")),
                strict=True,
            )
        )
    )


def _slices(counts: NDArray[Any]) -> list[Any]:
    """Return where the entries of each rollout are; None if it has none by the count `NONE`."""
    ends = np.cumsum(np.maximum(counts, 0), dtype=np.int64).tolist()
    return [
        None if count == NONE else slice(end - count, end)
        for count, end in zip(counts.tolist(), ends, strict=True)
    ]
