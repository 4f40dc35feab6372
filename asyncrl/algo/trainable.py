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
from asyncrl.types import Group, Rollout

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
    greedy = [] if group.greedy_reward is None else [group.greedy_reward]
    for name, values, lowest, highest in (
        ("finished_version", group.finished_version, 0, MOST_VERSION),
        ("length of generator_id", len(group.generator_id), 0, MOST_CHARACTERS),
        ("sampling_s", group.sampling_s, 0, LONGEST_S),
        ("reward_s", group.reward_s, 0, LONGEST_S),
        ("time of day", list(group.times or ()), 0, LATEST_AT),
        ("greedy_reward", greedy, -MOST_REWARD, MOST_REWARD),
        ("number of episode metrics", len(group.episode_metrics), 0, MOST_PARTS),
    ):
        yield from _beyond(name, values, lowest, highest)
    for index, rollout in enumerate(group.rollouts):
        yield from (f"rollout {index}: {fault}" for fault in _rollout_faults(rollout, limits))
    yield from _recorded_faults(group.recorded, limits)
    yield from _episode_faults(group) if group.episode_of is not None else ()
    for metric, column in group.episode_metrics.items():
        if not is_name(metric):
            yield f"an episode metric has the name {metric[:MOST_CHARACTERS]!r}, {NAME} are allowed"
        yield from _beyond(f"episode metric {metric}", column[~np.isnan(column)], -MOST_REWARD, MOST_REWARD)
    for reason, episodes in group.missing.items():
        if not is_name(reason) or not 1 <= episodes <= MOST_VERSION:
            where = f"missing[{reason[:MOST_CHARACTERS]!r}] is {episodes}"
            yield f"{where}; a name of {NAME}, and 1 episode or more are allowed"


def _episode_faults(group: Group) -> Iterator[str]:
    for index, episode in enumerate(group.by_episode):
        if len(episode) > MOST_SEQUENCES:
            yield f"episode {index}: {len(episode)} rollouts, {MOST_SEQUENCES} are allowed"
        results = [(one.reward, one.reward_parts, one.answer, one.finish_reason) for one in episode]
        if any(result != results[0] for result in results):
            yield f"episode {index}: its rollouts have different rewards, answers or finish reasons"


def _rollout_faults(rollout: Rollout, limits: GroupLimits) -> Iterator[str]:
    prompt, response, parts = len(rollout.prompt_ids), len(rollout.response_ids), rollout.reward_parts
    turn_rewards = None if rollout.turns is None else rollout.turns.rewards
    for name, values, lowest, highest in (
        ("length of the prompt", prompt, 1, np.inf),
        ("length of the response", response, 1, np.inf),
        ("length of prompt and response", prompt + response, 0, limits.max_tokens),
        ("token of the prompt", rollout.prompt_ids, 0, limits.vocabulary - 1),
        ("token of the response", rollout.response_ids, 0, limits.vocabulary - 1),
        ("log-probability", rollout.behaviour_logprobs, -MOST_NATS, ROUNDING_NATS),
        ("log-probability of the teacher", rollout.recorded.get(TEACHER, ()), -MOST_NATS, ROUNDING_NATS),
        ("version", [span.version for span in rollout.version_spans], 0, MOST_VERSION),
        ("length of a version", [span.tokens for span in rollout.version_spans], 1, np.inf),
        ("length of the finish reason", len(rollout.finish_reason), 0, MOST_CHARACTERS),
        ("length of the answer", len(rollout.answer or ""), 0, MOST_CHARACTERS),
        ("number of reward parts", len(parts), 0, MOST_PARTS),
        ("length of the name of a reward part", list(map(len, parts)), 0, MOST_CHARACTERS),
        ("reward", rollout.reward, -MOST_REWARD, MOST_REWARD),
        *((f"reward part {part:.{MOST_CHARACTERS}}", value, -MOST_REWARD, MOST_REWARD)
          for part, value in parts.items()),
        ("turn reward", () if turn_rewards is None else turn_rewards, -MOST_REWARD, MOST_REWARD),
    ):  # fmt: skip
        yield from _beyond(name, values, lowest, highest)
    for required in limits.required:
        if required not in rollout.recorded:
            yield f"no column {required}, which this run needs"
    yield from _recorded_faults(rollout.recorded, limits)
    if KEPT_COUNTS in rollout.recorded or KEPT_IDS in rollout.recorded:
        yield from _kept_faults(rollout)
    if rollout.turns is not None:
        ends = rollout.turns.ends
        last = int(ends[-1]) if len(ends) else 0
        if not rollout.action_mask[ends - 1].all() or rollout.action_mask[last:].any():
            yield f"{len(ends)} turns; each ends with an action, and the last one with the last action"


def _recorded_faults(recorded: Mapping[str, NDArray[Any]], limits: GroupLimits) -> Iterator[str]:
    for name, column in recorded.items():
        axes = COLUMNS[name].axes[1:]
        # Of an axis that this run does not have, no size is right.
        if list(column.shape[1:]) != (sizes := [limits.sizes.get(axis) for axis in axes]):
            yield f"{name} has entries of the shape {list(column.shape[1:])}; {sizes} of {axes} are allowed"
        if (of := COLUMNS[name].below) is not None:
            yield from _beyond(f"entry of {name} ({of})", column, NONE, limits.sizes.get(of, 0) - 1)


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


def is_name(text: str) -> bool:
    """Return whether the text can be the name of a published metric."""
    return 0 < len(text) <= MOST_CHARACTERS and all(
        one.isascii() and (one.isalnum() or one in "_./-") for one in text
    )


def _beyond(name: str, values: Any, lowest: float, highest: float) -> Iterator[str]:
    """Yield a fault for each of `values`, or the only one, that is NaN or not between `lowest` and `highest`.

    Of an array, only the extremes are looked at: this runs for all tokens of each group.
    """
    if isinstance(values, np.ndarray):
        values = (values.min(), values.max()) if len(values) else ()
    for value in values if isinstance(values, list | tuple) else (values,):
        if not lowest <= value <= highest:  # false for NaN
            yield f"{name} is {value:.12g}, {lowest:.12g} to {highest:.12g} are allowed"
