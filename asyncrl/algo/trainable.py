"""Decides whether a group can be trained on; everything that reads groups relies on it.

A frame that decodes can hold any numbers, from a faulty sender or from other settings before a resume. The
generator checks a group before it hands it over; the learner checks it again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.algo.ranges import MOST_KEPT, MOST_REWARD, MOST_SEQUENCES
from asyncrl.columns import COLUMNS, KEPT_COUNTS, KEPT_IDS, NONE, TEACHER
from asyncrl.types import Group, Rollout, Turns

# The reason in counts and dead letters.
UNTRAINABLE = "untrainable"
# A log-probability is at least -MOST_NATS, so that sums over the longest response stay finite in float32, and
# at most 0 plus the rounding errors of engines.
MOST_NATS = 1e5
ROUNDING_NATS = 1e-2
MOST_VERSION = 1 << 31
# Bounds on a rollout's reward parts and an episode's metrics, and on the length of a name or an answer.
MOST_PARTS, MOST_CHARACTERS = 64, 200
NAME = f"1 to {MOST_CHARACTERS} letters, digits and `_ . / -`"
# Upper bounds of a time of day (Unix seconds) and of a duration.
LATEST_AT, LONGEST_S = 1e11, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """The limits that depend on the run and the lane."""

    vocabulary: int  # number of token ids
    rollouts: int  # most episodes of a group, each with up to `MOST_SEQUENCES` rollouts
    max_tokens: int  # most tokens of a prompt and its response together
    # True: a group must have exactly `rollouts` episodes, because statistics are taken over them.
    whole: bool = False
    # Recorded columns that every rollout must have.
    required: tuple[str, ...] = ()
    # Of the axes behind the first one of recorded columns, by name: equal in all groups of the run. Also how
    # many there are of what a column numbers, such as experts.
    sizes: Mapping[str, int] = field(default_factory=dict)


def trainable(group: Group, limits: GroupLimits) -> str | None:
    """The reason why the group must not be used; None if it can be trained on. Not for dead groups."""
    return next(_faults(group, limits), None)


def _faults(group: Group, limits: GroupLimits) -> Iterator[str]:
    count = group.episodes
    if not 1 <= count <= limits.rollouts or (limits.whole and count != limits.rollouts):
        noun = "rollouts" if group.episode_of is None else "episodes"
        yield f"{count} {noun}, {'exactly' if limits.whole else '1 to'} {limits.rollouts} are allowed"
    if not 0 <= group.finished_version <= MOST_VERSION:
        yield f"finished_version {group.finished_version} is no version"
    if len(group.generator_id) > MOST_CHARACTERS:
        yield f"a generator_id of {len(group.generator_id)} characters, {MOST_CHARACTERS} are allowed"
    for name, seconds in (("sampling_s", group.sampling_s), ("reward_s", group.reward_s)):
        if not 0 <= seconds <= LONGEST_S:  # false for NaN
            yield f"{name} {seconds:g} is no duration, 0 to {LONGEST_S:g} are allowed"
    for at in group.times or ():
        if not 0 <= at <= LATEST_AT:
            yield f"times {at:g} is no time of day"
    if group.greedy_reward is not None and not abs(group.greedy_reward) <= MOST_REWARD:
        yield f"greedy_reward {group.greedy_reward:g}, at most {MOST_REWARD:g} is allowed"
    for index, rollout in enumerate(group.rollouts):
        yield from (f"rollout {index}: {fault}" for fault in _rollout_faults(rollout, limits))
    yield from _recorded_faults(group.recorded, limits)
    yield from _episode_faults(group) if group.episode_of is not None else ()
    yield from _metric_faults(group) if group.episode_metrics or group.missing else ()


def _episode_faults(group: Group) -> Iterator[str]:
    for index, episode in enumerate(group.by_episode):
        if len(episode) > MOST_SEQUENCES:
            yield f"episode {index}: {len(episode)} rollouts, {MOST_SEQUENCES} are allowed"
        results = [(one.reward, one.reward_parts, one.answer, one.finish_reason) for one in episode]
        if any(result != results[0] for result in results):
            yield f"episode {index}: its rollouts have different rewards, answers or finish reasons"


def _metric_faults(group: Group) -> Iterator[str]:
    if len(group.episode_metrics) > MOST_PARTS:
        yield f"{len(group.episode_metrics)} episode metrics, {MOST_PARTS} are allowed"
    for name, values in group.episode_metrics.items():
        if not is_name(name):
            yield f"an episode metric has the name {name[:MOST_CHARACTERS]!r}, {NAME} are allowed"
        if (wrong := _outside(values[~np.isnan(values)], -MOST_REWARD, MOST_REWARD)) is not None:
            yield f"episode metric {name} is {wrong:g}, {-MOST_REWARD:g} to {MOST_REWARD:g} are allowed"
    for reason, episodes in group.missing.items():
        if not is_name(reason) or not 1 <= episodes <= MOST_VERSION:
            where = f"missing[{reason[:MOST_CHARACTERS]!r}] is {episodes}"
            yield f"{where}; a name of {NAME}, and 1 episode or more are allowed"


def _rollout_faults(rollout: Rollout, limits: GroupLimits) -> Iterator[str]:
    prompt, response = len(rollout.prompt_ids), len(rollout.response_ids)
    if not prompt or not response:
        yield f"a prompt of {prompt} tokens with a response of {response}; each needs 1 at least"
    if prompt + response > limits.max_tokens:
        yield f"{prompt + response} tokens, {limits.max_tokens} are allowed"
    for name, ids in (("prompt", rollout.prompt_ids), ("response", rollout.response_ids)):
        if (wrong := _outside(ids, 0, limits.vocabulary - 1)) is not None:
            yield f"{name} token {wrong:.0f} is outside the vocabulary of {limits.vocabulary}"
    yield from _logprob_faults(rollout, limits)
    for span in rollout.version_spans:
        if not (0 <= span.version <= MOST_VERSION and span.tokens > 0):
            yield f"{span.tokens} tokens of version {span.version}; versions start at 0, tokens at 1"
    if len(rollout.finish_reason) > MOST_CHARACTERS:
        yield f"a finish reason of {len(rollout.finish_reason)} characters, {MOST_CHARACTERS} are allowed"
    if rollout.answer is not None and len(rollout.answer) > MOST_CHARACTERS:
        yield f"an answer of {len(rollout.answer)} characters, {MOST_CHARACTERS} are allowed"
    yield from _recorded_faults(rollout.recorded, limits)
    if KEPT_COUNTS in rollout.recorded or KEPT_IDS in rollout.recorded:
        yield from _kept_faults(rollout)
    yield from _reward_faults(rollout)
    yield from _turn_faults(rollout, rollout.turns) if rollout.turns else ()


def _logprob_faults(rollout: Rollout, limits: GroupLimits) -> Iterator[str]:
    for logprobs in (rollout.behaviour_logprobs, rollout.recorded.get(TEACHER, np.zeros(0))):
        if (wrong := _outside(logprobs, -MOST_NATS, ROUNDING_NATS)) is not None:
            yield f"log-probability {wrong:g}, {-MOST_NATS:g} to {ROUNDING_NATS:g} are allowed"
    for name in limits.required:
        if name not in rollout.recorded:
            yield f"no column {name}, which this run needs"


def _recorded_faults(recorded: Mapping[str, NDArray[Any]], limits: GroupLimits) -> Iterator[str]:
    for name, column in recorded.items():
        axes = COLUMNS[name].axes[1:]
        # Of an axis that this run does not have, no size is right.
        if list(column.shape[1:]) != (sizes := [limits.sizes.get(axis) for axis in axes]):
            yield f"{name} has entries of the shape {list(column.shape[1:])}; {sizes} of {axes} are allowed"
        if (of := COLUMNS[name].below) is not None:
            most = limits.sizes.get(of, 0) - 1
            if (wrong := _outside(column, NONE, most)) is not None:
                yield f"{name} has {wrong:.0f}, but {of} are {NONE} (none) to {most}"


def _kept_faults(rollout: Rollout) -> Iterator[str]:
    tokens, none = len(rollout.response_ids), np.zeros(0, np.int32)
    counts, ids = (rollout.recorded.get(name, none) for name in (KEPT_COUNTS, KEPT_IDS))
    if len(counts) != tokens or counts.sum() != len(ids) or ids.min(initial=0) < 0:
        yield f"{len(counts)} kept_counts of {len(ids)} kept_ids for {tokens} tokens contradict each other"
        return
    if (most := counts.max(initial=0)) > MOST_KEPT:
        yield f"a token could have been {most} ones, {MOST_KEPT} are allowed"
    is_sampled = np.zeros(tokens, np.bool_)
    of = np.repeat(np.arange(tokens), counts)
    is_sampled[of[ids == rollout.response_ids[of]]] = True
    if ((counts > 0) != rollout.action_mask).any() or (is_sampled != rollout.action_mask).any():
        yield "kept_ids must have each sampled token among those of its place, and none of other tokens"


def _turn_faults(rollout: Rollout, turns: Turns) -> Iterator[str]:
    last = int(turns.ends[-1]) if len(turns.ends) else 0
    if not rollout.action_mask[turns.ends - 1].all() or rollout.action_mask[last:].any():
        yield f"{len(turns.ends)} turns; each ends with an action, and the last one with the last action"
    rewards = np.zeros(0) if turns.rewards is None else turns.rewards
    if (wrong := _outside(rewards, -MOST_REWARD, MOST_REWARD)) is not None:
        yield f"turn reward {wrong:g}, {-MOST_REWARD:g} to {MOST_REWARD:g} are allowed"


def _reward_faults(rollout: Rollout) -> Iterator[str]:
    parts = rollout.reward_parts
    if len(parts) > MOST_PARTS or any(len(name) > MOST_CHARACTERS for name in parts):
        yield f"{len(parts)} reward parts; {MOST_PARTS} with {MOST_CHARACTERS} characters each are allowed"
    for name, value in (("reward", rollout.reward), *parts.items()):
        if not abs(value) <= MOST_REWARD:
            yield f"{name[:MOST_CHARACTERS]} {value:g}, {-MOST_REWARD:g} to {MOST_REWARD:g} are allowed"


def is_name(text: str) -> bool:
    """Return whether the text can be the name of a published metric."""
    return 0 < len(text) <= MOST_CHARACTERS and all(
        one.isascii() and (one.isalnum() or one in "_./-") for one in text
    )


def _outside(values: NDArray[np.generic], lowest: float, highest: float) -> float | None:
    """One of `values` that is NaN or not between `lowest` and `highest`, if there is any."""
    if not len(values):
        return None
    extremes = float(values.min()), float(values.max())
    # The comparison is false for NaN.
    return next((value for value in extremes if not lowest <= value <= highest), None)
