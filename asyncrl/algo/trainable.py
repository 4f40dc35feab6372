"""The one judge of what a group must be before anything digests it: planner, trainer, metrics, timeline, samples, evaluation.

A frame that decodes is what its sender says, and no more. Its numbers may be of other settings than those of today (a run
that was resumed with shorter answers), or of nobody's. Generators ask before they hand a group over, the learner asks again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.types import Group, Rollout

# What the reason begins with, and how it is counted.
UNTRAINABLE = "untrainable"
# Sums of squares of a batch stay finite in float32.
MOST_REWARD = 1e9
# Of one log-probability, below 0; sums over the longest answer stay finite in float32.
MOST_NATS = 1e5
# A log-probability is at most 0; engines round.
ROUNDING_NATS = 1e-2
MOST_VERSION = 1 << 31
# Of the rewards of one rollout, and of a name or an answer.
MOST_PARTS, MOST_CHARACTERS = 64, 200
# Unix seconds, and seconds, beyond which a number is no time.
LATEST_AT, LONGEST_S = 1e11, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """What depends on the run and the lane."""

    # Token ids are below it.
    vocabulary: int
    # Of a group, at most.
    rollouts: int
    # Of a prompt and its response.
    max_tokens: int
    # True: a group has exactly `rollouts`, as statistics over them need.
    whole: bool = False


def trainable(group: Group, limits: GroupLimits) -> str | None:
    """Why nothing may digest the group; None for a group that everything can. Dead groups are not asked about."""
    return next(_faults(group, limits), None)


def _faults(group: Group, limits: GroupLimits) -> Iterator[str]:
    count = len(group.rollouts)
    if not 1 <= count <= limits.rollouts or (limits.whole and count != limits.rollouts):
        yield f"{count} rollouts, {'exactly' if limits.whole else '1 to'} {limits.rollouts} are allowed"
    if not 0 <= group.finished_version <= MOST_VERSION:
        yield f"finished_version {group.finished_version} is no version"
    if len(group.generator_id) > MOST_CHARACTERS:
        yield f"a generator_id of {len(group.generator_id)} characters, {MOST_CHARACTERS} are allowed"
    for name, seconds in (("sampling_s", group.sampling_s), ("reward_s", group.reward_s)):
        if not 0 <= seconds <= LONGEST_S:  # NaN is not
            yield f"{name} {seconds:g} is no duration, 0 to {LONGEST_S:g} are allowed"
    for at in group.times or ():
        if not 0 <= at <= LATEST_AT:
            yield f"times {at:g} is no time of day"
    if group.greedy_reward is not None and not abs(group.greedy_reward) <= MOST_REWARD:
        yield f"greedy_reward {group.greedy_reward:g}, at most {MOST_REWARD:g} is allowed"
    for index, rollout in enumerate(group.rollouts):
        yield from (f"rollout {index}: {fault}" for fault in _rollout_faults(rollout, limits))


def _rollout_faults(rollout: Rollout, limits: GroupLimits) -> Iterator[str]:
    prompt, response = len(rollout.prompt_ids), len(rollout.response_ids)
    if not prompt or not response:
        yield f"a prompt of {prompt} tokens with a response of {response}; each needs 1 at least"
    if prompt + response > limits.max_tokens:
        yield f"{prompt + response} tokens, {limits.max_tokens} are allowed"
    for name, ids in (("prompt", rollout.prompt_ids), ("response", rollout.response_ids)):
        if (wrong := _outside(ids, 0, limits.vocabulary - 1)) is not None:
            yield f"{name} token {wrong:.0f} is outside the vocabulary of {limits.vocabulary}"
    if (wrong := _outside(rollout.behaviour_logprobs, -MOST_NATS, ROUNDING_NATS)) is not None:
        yield f"log-probability {wrong:g}, {-MOST_NATS:g} to {ROUNDING_NATS:g} are allowed"
    for span in rollout.version_spans:
        if not (0 <= span.version <= MOST_VERSION and span.tokens > 0):
            yield f"{span.tokens} tokens of version {span.version}; neither may be negative, nor the tokens none"
    if len(rollout.finish_reason) > MOST_CHARACTERS:
        yield f"a finish reason of {len(rollout.finish_reason)} characters, {MOST_CHARACTERS} are allowed"
    if rollout.answer is not None and len(rollout.answer) > MOST_CHARACTERS:
        yield f"an answer of {len(rollout.answer)} characters, {MOST_CHARACTERS} are allowed"
    yield from _reward_faults(rollout)


def _reward_faults(rollout: Rollout) -> Iterator[str]:
    parts = rollout.reward_parts
    if len(parts) > MOST_PARTS or any(len(name) > MOST_CHARACTERS for name in parts):
        yield f"{len(parts)} reward parts; {MOST_PARTS} with names of {MOST_CHARACTERS} characters are allowed"
    for name, value in (("reward", rollout.reward), *parts.items()):
        if not abs(value) <= MOST_REWARD:
            yield f"{name[:MOST_CHARACTERS]} {value:g}, {-MOST_REWARD:g} to {MOST_REWARD:g} are allowed"


def _outside(values: NDArray[np.generic], lowest: float, highest: float) -> float | None:
    """One of `values` that is not between the two; NaN is not."""
    if not len(values):
        return None
    extremes = float(values.min()), float(values.max())
    return next((value for value in extremes if math.isnan(value) or not lowest <= value <= highest), None)
