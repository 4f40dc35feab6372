"""A rollout group as a frame: the columns of all its rollouts, concatenated into few tensors.

Rollout r of the group owns the next `prompt_tokens[r]`, `response_tokens[r]`, `spans[r]`, `answer_bytes[r]`
entries of the columns. The columns of `_OPTIONAL` are in the frame only if the group has episodes of several
turns: episode e owns the next entries of `episode_metrics`, rollout r the next `turns[r]` of its turns.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError
from asyncrl.types import Group, GroupTimes, Rollout, Turns, VersionSpan
from asyncrl.wire.codec import DTYPES, Limits, decode_frame, encode_frame

# A frame must fit into one value of Redis (512 MiB).
GROUP_LIMITS = Limits(
    kind=1, meta_bytes=1 << 16, body_bytes=(1 << 29) - (1 << 17), items=256, text_bytes=4096
)
# Bounds for one group. Rollouts and spans are bounded in number, because each is many times larger in memory
# than in the frame.
MAX_ROLLOUTS, MAX_SPANS, MAX_ANSWER_BYTES = 4096, 1 << 16, 1024
# The value in `answer_bytes` if no reward function has reported the answer, and in `turns` if there are none.
NONE = -1
# A longer `dead_reason` is cut off.
REASON_CHARACTERS = 1000

T = TypeVar("T")

_COLUMNS = {
    "prompt_tokens": "int32",
    "response_tokens": "int32",
    "spans": "int32",
    "prompt_ids": "int32",
    "response_ids": "int32",
    "action_mask": "uint8",
    "behaviour_logprobs": "float32",
    "span_versions": "int64",
    "span_lineages": "int64",
    "span_tokens": "int32",
    "finish": "uint8",
    "rewards": "float64",
    "reward_parts": "float64",
    "answer_bytes": "int32",
    "answers": "uint8",
}
_OPTIONAL = {
    "episode_of": "int32",
    "episode_metrics": "float32",
    "turns": "int32",
    "turn_ends": "int32",
    "turn_rewards": "float32",
    "turn_states": "uint64",
    "turn_order": "int32",
}
# Columns of `Turns` that only some groups have.
_OF_TURNS = ("rewards", "states", "order")
# Numpy's objects, because comparing them is faster than making their names.
_DTYPES = {name: DTYPES[kind] for name, kind in _COLUMNS.items()}
_OPTIONAL_DTYPES = {name: DTYPES[kind] for name, kind in _OPTIONAL.items()}
# The lowest value of each column of counts.
_LOWEST = {
    **dict.fromkeys(("prompt_tokens", "response_tokens", "spans", "span_tokens"), 0),
    **dict.fromkeys(("answer_bytes", "turns"), NONE),
}


def encode_group(group: Group, key: bytes = b"") -> bytes:
    """Return one frame. Raises WireError for numbers that are not finite: they cannot be trained on."""
    rollouts = group.rollouts
    finish_reasons = sorted({rollout.finish_reason for rollout in rollouts})
    parts = sorted({part for rollout in rollouts for part in rollout.reward_parts})
    answers = [
        None if rollout.answer is None else rollout.answer.encode("utf-8", "replace") for rollout in rollouts
    ]
    columns: dict[str, Any] = {
        "prompt_tokens": [len(rollout.prompt_ids) for rollout in rollouts],
        "response_tokens": [len(rollout.response_ids) for rollout in rollouts],
        "spans": [len(rollout.version_spans) for rollout in rollouts],
        "span_versions": [span.version for rollout in rollouts for span in rollout.version_spans],
        "span_lineages": [span.lineage for rollout in rollouts for span in rollout.version_spans],
        "span_tokens": [span.tokens for rollout in rollouts for span in rollout.version_spans],
        "finish": [finish_reasons.index(rollout.finish_reason) for rollout in rollouts],
        "rewards": [rollout.reward for rollout in rollouts],
        # NaN marks a part that this rollout does not have; no reward is NaN.
        "reward_parts": [rollout.reward_parts.get(part, np.nan) for rollout in rollouts for part in parts],
        "answer_bytes": [NONE if answer is None else len(answer) for answer in answers],
        "answers": np.frombuffer(b"".join(answer or b"" for answer in answers), dtype=np.uint8),
    }
    arrays = {name: np.asarray(column, dtype=_COLUMNS[name]) for name, column in columns.items()}
    for name in ("prompt_ids", "response_ids", "action_mask", "behaviour_logprobs"):
        pieces = [np.empty(0, dtype=_COLUMNS[name]), *(getattr(rollout, name) for rollout in rollouts)]
        arrays[name] = np.concatenate(pieces, dtype=_COLUMNS[name])
    arrays |= _episode_columns(group)
    _check_counts(arrays)
    reward_parts = [value for rollout in rollouts for value in rollout.reward_parts.values()]
    _check_finite(arrays, group.greedy_reward, reward_parts)
    meta = {
        "lane": group.lane,
        "ticket_id": group.ticket_id,
        "generator_id": group.generator_id,
        "finished_version": group.finished_version,
        "sampling_s": float(group.sampling_s),
        "reward_s": float(group.reward_s),
        "dead_reason": None if group.dead_reason is None else group.dead_reason[:REASON_CHARACTERS],
        "finish_reasons": finish_reasons,
        "parts": parts,
    }
    if group.greedy_reward is not None:
        meta["greedy_reward"] = float(group.greedy_reward)
    if group.times is not None:
        meta["times"] = [float(at) for at in group.times]
    if group.episode_metrics:
        meta["episode_metrics"] = list(group.episode_metrics)
    if group.missing:
        meta["missing"] = dict(group.missing)
    return encode_frame(GROUP_LIMITS, meta, arrays, key=key)


def _episode_columns(group: Group) -> dict[str, NDArray[Any]]:
    """Return the optional columns that the group needs. Reward, state or order of a turn without one is 0."""
    turns = [rollout.turns for rollout in group.rollouts]
    columns: dict[str, list[NDArray[Any]]] = {}
    if group.episode_of is not None:
        columns["episode_of"] = [group.episode_of]
    if group.episode_metrics:
        columns["episode_metrics"] = [np.stack(list(group.episode_metrics.values()), axis=1).ravel()]
    if played := [one for one in turns if one is not None]:
        columns["turns"] = [np.array([NONE if one is None else len(one.ends) for one in turns])]
        columns["turn_ends"] = [one.ends for one in played]
        for name in _OF_TURNS:
            given = [getattr(one, name) for one in played]
            if any(column is not None for column in given):
                columns[f"turn_{name}"] = [
                    np.zeros(len(one.ends), dtype=_OPTIONAL[f"turn_{name}"]) if column is None else column
                    for one, column in zip(played, given, strict=True)
                ]
    return {name: np.concatenate(parts).astype(_OPTIONAL[name]) for name, parts in columns.items()}


def decode_group(data: bytes | bytearray, key: bytes | None = b"") -> Group:
    """The inverse of `encode_group`; arrays are read-only views. Raises WireError if it is not a group.

    `key=None` skips the checksum, for bytes that have passed it before.
    """
    frame = decode_frame(GROUP_LIMITS, data, key=key)
    _check_columns(frame.arrays)
    meta = frame.meta
    greedy_reward = _optional(meta, "greedy_reward", float)
    _check_finite(frame.arrays, greedy_reward)
    try:
        return Group(
            ticket_id=_value(meta, "ticket_id", int),
            rollouts=_rollouts(frame.arrays, _texts(meta, "finish_reasons"), _texts(meta, "parts")),
            generator_id=_value(meta, "generator_id", str),
            finished_version=_value(meta, "finished_version", int),
            sampling_s=_value(meta, "sampling_s", float),
            reward_s=_value(meta, "reward_s", float),
            times=_times(meta),
            lane=_value(meta, "lane", str),
            greedy_reward=greedy_reward,
            dead_reason=_optional(meta, "dead_reason", str),
            episode_of=frame.arrays.get("episode_of"),
            episode_metrics=_episode_metrics(frame.arrays, meta),
            missing=_missing(meta),
        )
    except (ValueError, IndexError) as error:
        raise WireError(f"the columns of the group contradict each other: {error}") from error


def _check_columns(arrays: Mapping[str, NDArray[Any]]) -> None:
    found = {name: array.dtype for name, array in arrays.items()}
    if found != _DTYPES:
        _check_optional(found)
    _check_counts(arrays)
    for name, least in _LOWEST.items():
        if name in arrays and (arrays[name] < least).any():
            raise WireError(f"the group has a negative count in {name}")
    if (arrays["action_mask"] > 1).any():
        raise WireError("the group has an action mask with values other than 0 and 1")


def _check_optional(found: Mapping[str, np.dtype[Any]]) -> None:
    if not _DTYPES.items() <= found.items() <= (_DTYPES | _OPTIONAL_DTYPES).items():
        names = {name: dtype.name for name, dtype in found.items()}
        raise WireError(f"the group has tensors {names}; needed are {_COLUMNS}, allowed too are {_OPTIONAL}")
    if ("turns" in found) != ("turn_ends" in found) or any(
        f"turn_{name}" in found and "turns" not in found for name in _OF_TURNS
    ):
        raise WireError(f"the group has tensors {list(found)}; turns and turn_ends come together")


def _check_counts(arrays: Mapping[str, NDArray[Any]]) -> None:
    rollouts, spans = len(arrays["rewards"]), len(arrays["span_tokens"])
    if rollouts > MAX_ROLLOUTS or spans > MAX_SPANS:
        raise WireError(
            f"the group has {rollouts} rollouts with {spans} version spans; at most {MAX_ROLLOUTS} and "
            f"{MAX_SPANS} are allowed"
        )
    most = arrays["answer_bytes"].max(initial=0)
    if most > MAX_ANSWER_BYTES:
        raise WireError(f"the group has an answer of {most} bytes; at most {MAX_ANSWER_BYTES} are allowed")


def _check_finite(
    arrays: Mapping[str, NDArray[Any]], greedy_reward: float | None, reward_parts: Sequence[float] = ()
) -> None:
    columns = {name: arrays[name] for name in ("behaviour_logprobs", "rewards")}
    if "turn_rewards" in arrays:
        columns["turn_rewards"] = arrays["turn_rewards"]
    if "episode_metrics" in arrays:  # NaN marks a metric that this episode does not have
        columns["episode_metrics"] = arrays["episode_metrics"][~np.isnan(arrays["episode_metrics"])]
    numbers = {"reward_parts": reward_parts, "greedy_reward": [greedy_reward or 0.0]}
    wrong = [name for name, values in columns.items() if not np.isfinite(values).all()]
    wrong += [name for name, values in numbers.items() if not all(map(math.isfinite, values))]
    if wrong:
        raise WireError(f"the group has {wrong[0]} that are not finite; every number of a rollout must be")


def _rollouts(
    arrays: Mapping[str, NDArray[Any]], finish_reasons: list[str], parts: list[str]
) -> tuple[Rollout, ...]:
    count = len(arrays["rewards"])
    prompt_ids = _split(arrays["prompt_ids"], arrays["prompt_tokens"], count)
    response_ids = _split(arrays["response_ids"], arrays["response_tokens"], count)
    masks = _split(arrays["action_mask"].view(np.bool_), arrays["response_tokens"], count)
    logprobs = _split(arrays["behaviour_logprobs"], arrays["response_tokens"], count)
    span_columns = [
        _split(arrays[name], arrays["spans"], count)
        for name in ("span_versions", "span_tokens", "span_lineages")
    ]
    part_values = arrays["reward_parts"].reshape(count, len(parts)).tolist()
    answers = _split(arrays["answers"], arrays["answer_bytes"].clip(min=0), count)
    has_answer = (arrays["answer_bytes"] > NONE).tolist()
    rewards, finish = arrays["rewards"].tolist(), arrays["finish"].tolist()
    turns = _turns(arrays, count)
    if len(finish) != count:
        raise ValueError(f"{len(finish)} finish reasons for {count} rollouts")
    return tuple(
        Rollout(
            prompt_ids=prompt_ids[r],
            response_ids=response_ids[r],
            action_mask=masks[r],
            behaviour_logprobs=logprobs[r],
            version_spans=tuple(map(VersionSpan, *(column[r].tolist() for column in span_columns))),
            finish_reason=finish_reasons[finish[r]],
            reward=rewards[r],
            reward_parts={part: x for part, x in zip(parts, part_values[r], strict=True) if x == x},
            answer=answers[r].tobytes().decode() if has_answer[r] else None,
            turns=turns[r],
        )
        for r in range(count)
    )


def _turns(arrays: Mapping[str, NDArray[Any]], count: int) -> list[Turns | None]:
    if "turns" not in arrays:
        return [None] * count
    lengths = arrays["turns"]
    columns = {
        name: _split(arrays[f"turn_{name}"], lengths.clip(min=0), count)
        for name in ("ends", *_OF_TURNS)
        if f"turn_{name}" in arrays
    }
    return [
        None if length == NONE else Turns(**{name: column[r] for name, column in columns.items()})
        for r, length in enumerate(lengths.tolist())
    ]


def _episode_metrics(
    arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]
) -> dict[str, NDArray[np.float32]]:
    names = _texts(meta, "episode_metrics") if "episode_metrics" in meta else []
    if bool(names) != ("episode_metrics" in arrays):
        raise WireError(f"episode_metrics of the group has names {names!r:.200}, which need a column")
    if not names:
        return {}
    table = arrays["episode_metrics"].reshape(-1, len(names))
    return {name: table[:, index] for index, name in enumerate(names)}


def _missing(meta: Mapping[str, Any]) -> dict[str, int]:
    missing = _optional(meta, "missing", dict) or {}
    if not all(type(reason) is str and type(episodes) is int for reason, episodes in missing.items()):
        raise WireError(f"missing of the group is {reprlib.repr(missing)}; numbers by reason are needed")
    return missing


def _split(column: NDArray[Any], lengths: NDArray[Any], count: int) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if len(lengths) != count or total != len(column):
        raise ValueError(
            f"{len(lengths)} lengths that add up to {total} for {count} rollouts and {len(column)} entries"
        )
    return [column[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def _texts(meta: Mapping[str, Any], name: str) -> list[str]:
    texts = _value(meta, name, list)
    if not all(type(text) is str for text in texts):
        raise WireError(f"{name} of the group has an entry that is not a text")
    return texts


def _times(meta: Mapping[str, Any]) -> GroupTimes | None:
    match meta.get("times"):
        case None:
            return None
        case [float(leased_at), float(sampling_at), float(put_at)]:
            return GroupTimes(leased_at, sampling_at, put_at)
        case found:
            raise WireError(f"times of the group is {reprlib.repr(found)}; three Unix times are needed")


def _value(meta: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = meta.get(name)
    if type(value) is not kind:
        raise WireError(f"{name} of the group is {reprlib.repr(value)}; a {kind.__name__} is needed")
    return value


def _optional(meta: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    return None if meta.get(name) is None else _value(meta, name, kind)
