"""The published metrics of a step whose episodes have several turns. Names and units: `docs/metrics.md`."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncrl.algo.trainable import MOST_PARTS
from asyncrl.types import Group, Rollout

# Other finish reasons, which a generator of another release may give, count as `other`.
ENDINGS = ("stop", "length", "turns", "sequences", "time")


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the means over episodes, or nothing if no group was played in turns."""
    episodes = [episode for group in groups for episode in group.by_episode]
    if all(len(episode) == 1 and episode[0].turns is None for episode in episodes):
        return {}
    turns = [sum(_turns(rollout) for rollout in episode) for episode in episodes]
    endings = Counter(episode[0].finish_reason for episode in episodes)
    shares = {ending: endings.pop(ending, 0) for ending in ENDINGS} | {"other": endings.total()}
    rollouts = [rollout for episode in episodes for rollout in episode]
    tokens = sum(map(_tokens, rollouts))
    repeated = sum(_repeated(episode) for episode in episodes if len(episode) > 1)
    return {
        "episodes/turns_mean": float(np.mean(turns)),
        "episodes/turns_max": float(np.max(turns)),
        "episodes/sequences_mean": float(np.mean([len(episode) for episode in episodes])),
        **{f"episodes/ended_share/{ending}": count / len(episodes) for ending, count in shares.items()},
        "episodes/stateless_turn_share": 1 - sum(map(_states, rollouts)) / max(sum(turns), 1),
        "sequences/duplicate_share": repeated / tokens,
        **_environment_metrics(groups),
    }


def _turns(rollout: Rollout) -> int:
    return int(rollout.actions > 0) if rollout.turns is None else len(rollout.turns.ends)


def _states(rollout: Rollout) -> int:
    """Return how many turns have a state."""
    states = None if rollout.turns is None else rollout.turns.states
    return 0 if states is None else int(np.count_nonzero(states))


def _tokens(rollout: Rollout) -> int:
    return len(rollout.prompt_ids) + len(rollout.response_ids)


def _repeated(episode: Sequence[Rollout]) -> int:
    """Return the number of tokens that the learner computes again, after the same tokens as before.

    In lexicographic order, a sequence shares with the one before it the longest prefix that it shares with
    any before it.
    """
    ids = [np.concatenate([one.prompt_ids, one.response_ids]) for one in episode]
    ids.sort(key=lambda one: one.astype(">i4").tobytes())  # the order of these bytes is that of the tokens
    return sum(_shared_prefix(*pair) for pair in pairwise(ids))


def _shared_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length


def _environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean of each metric over the episodes that have it; of too many, the commonest."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for name, column in group.episode_metrics.items():
            values.setdefault(name, []).extend(column[~np.isnan(column)].tolist())
    commonest = Counter({name: len(found) for name, found in values.items() if found}).most_common(MOST_PARTS)
    return {f"environment/{name}": float(np.mean(values[name])) for name, _ in commonest}
