"""The nouns of the system. Read this file first; docs/glossary.md has every word of the project.

* Prompt: the text to answer, with the dataset row from which rewards are computed.
* Ticket: the permission to sample one prompt `group_size` times, with an integer id.
* Rollout: one sampled response, with each token's behaviour log-probability and policy version.
* Episode: one run of an environment, with a rollout per branch; without an environment, one rollout.
* Group: all episodes of one ticket; the buffer stores it whole or not at all.
* Version: the number of batches on which the weights were trained. One step trains on one batch.
* Lineage: the number of the learner's start that made a version; `lineage.py` explains it.
* Lag: version being trained minus version of a token, in steps.

Arrays are numpy, because they cross processes; only the learner uses torch.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.lineage import INITIAL, History, Weights


class VersionSpan(NamedTuple):
    """A run of consecutive response tokens that the same weights sampled."""

    version: int
    tokens: int
    lineage: int = 0

    @property
    def weights(self) -> Weights:
        return Weights(self.version, self.lineage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The permission to sample one prompt, which the id, the dataset and the seed determine."""

    id: int  # position in the sample plan, from 1, without gaps; kept when the ticket is tried again
    minimum_version: int  # older weights may not start the ticket: they would break the staleness bound
    history: History = INITIAL  # of the learner that issued the ticket; other weights may not start it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """The prompt of one ticket."""

    token_ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any]  # of the dataset; reward functions get its columns
    messages: tuple[Mapping[str, Any], ...] = ()  # of which `text` is the rendering; () without a template
    chat: Sequence[Mapping[str, Any]] | None = None  # the row's own messages, if it has no text
    held_out: int | None = None  # its place in its set of data.eval, from 0; it seeds the prompt's episodes
    task: int = 0  # place of its source or set in `DataConfig.tasks`, which scores and plays it
    images: Callable[[], Any] | None = None  # reads its images now, as `engine.base.PromptImages`
    teacher_ids: tuple[int, ...] = ()  # what the teacher reads in its place; () if it reads the same


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The turns that a rollout trains, one entry each. A turn that branches share is only in the first."""

    ends: NDArray[np.int32]  # the offset in the response behind the turn's last action, increasing
    rewards: NDArray[np.float32] | None = None  # what the environment gave each turn; part of `reward`
    states: NDArray[np.uint64] | None = None  # hash of the state that the turn began in; 0 if it has none
    order: NDArray[np.int32] | None = None  # sorts the episode's turns by time; None: they lie in time order

    def __post_init__(self) -> None:
        lengths = {len(one) for one in (self.ends, self.rewards, self.states, self.order) if one is not None}
        if len(lengths) > 1 or (np.diff(self.ends, prepend=0) <= 0).any():
            raise ValueError(f"turns end at {self.ends}, with columns of {lengths} entries; ends must rise")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One response to one prompt. Per-token columns have the length of `response_ids`."""

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]  # True where the policy sampled the token, False for tool and user text
    behaviour_logprobs: NDArray[np.float32]  # ln pi_behaviour, in nats, after temperature; 0 for no action
    version_spans: tuple[VersionSpan, ...]  # the weights that sampled each token, run-length encoded
    finish_reason: str  # `stop`, or why the response was cut off: `length`; of episodes also other limits
    reward: float = 0.0  # weighted sum of `reward_parts`, before shaping; never overwritten
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    # The answer that a reward function found: "" if it found none, None if no function looks for one.
    answer: str | None = None
    turns: Turns | None = None  # None: one turn
    # Further columns of the tokens, by their names in `columns.COLUMNS`.
    recorded: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spanned = sum(span.tokens for span in self.version_spans)
        lengths = (len(self.response_ids), len(self.action_mask), len(self.behaviour_logprobs), spanned)
        if len(set(lengths)) > 1:
            raise ValueError(f"ids, mask, logprobs and spans have {lengths} entries; each token needs one")
        if self.turns is not None and (self.turns.ends > len(self.response_ids)).any():
            raise ValueError(f"a turn ends behind the {len(self.response_ids)} tokens of the response")

    @property
    def actions(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return int(np.count_nonzero(self.action_mask))

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off."""
        return self.finish_reason != "stop"

    @property
    def versions(self) -> NDArray[np.int64]:
        """Return the policy version of every response token."""
        spans = np.array(self.version_spans, dtype=np.int64).reshape(-1, len(VersionSpan._fields))
        return np.repeat(spans[:, 0], spans[:, 1])


def time_of_day() -> float:
    """Return Unix seconds, for display only: clocks are adjusted, and clocks of hosts differ."""
    return time.time()


class GroupTimes(NamedTuple):
    """Times in the life of a group, by the generator's `time_of_day`."""

    leased_at: float
    sampling_at: float  # the generator had weights that may start the ticket
    put_at: float  # the first attempt to store the group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """All rollouts of one ticket in the order of its episodes, or the reason why there are none."""

    ticket_id: int
    rollouts: tuple[Rollout, ...]
    generator_id: str
    # The generator's version when the group was complete; it splits lag into in-flight and in-queue.
    finished_version: int
    sampling_s: float = 0.0
    reward_s: float = 0.0
    times: GroupTimes | None = None  # None for dead groups, and for groups sampled outside of a run
    lane: str = "train"  # the stream of tickets; the same id stands for another prompt in another lane
    greedy_reward: float | None = None  # of the greedy response to the prompt, if the advantage needs it
    # The ticket failed too often, for this reason. The group has no rollouts; it is counted and not trained.
    dead_reason: str | None = None
    # Non-decreasing from 0 without gaps: each rollout's episode, whose reward it has. None: an episode each.
    episode_of: NDArray[np.int32] | None = None
    # What the environment counted: an entry per episode, NaN where it has none.
    episode_metrics: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    # Number of episodes that the group goes without, by the reason why all their attempts failed.
    missing: Mapping[str, int] = field(default_factory=dict)
    # Further columns of the prompt, by their names in `columns.COLUMNS`.
    recorded: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        of = self.episode_of
        # Ranks have no gaps and begin at 0, so they are the sorted episodes only if these count up.
        if of is not None and (
            len(of) != len(self.rollouts)
            or not np.array_equal(np.unique(of, return_inverse=True)[1], np.sort(of))
        ):
            raise ValueError(f"the episodes {of} of {len(self.rollouts)} rollouts do not count up from 0")
        for name, values in self.episode_metrics.items():
            if len(values) != self.episodes:
                raise ValueError(f"metric {name} needs one entry for each of {self.episodes} episodes")

    @property
    def episodes(self) -> int:
        return len(self.rollouts) if self.episode_of is None else int(self.episode_of.max(initial=-1)) + 1

    @property
    def by_episode(self) -> list[tuple[Rollout, ...]]:
        """Return the rollouts of each episode, in the order in which they began."""
        if self.episode_of is None:
            return [(rollout,) for rollout in self.rollouts]
        bounds = np.searchsorted(self.episode_of, np.arange(self.episodes + 1)).tolist()
        return [self.rollouts[first:end] for first, end in pairwise(bounds)]

    @classmethod
    def dead(
        cls, ticket_id: int, reason: str, *, generator_id: str, version: int, lane: str = "train"
    ) -> Self:
        """Return the group that stands for a ticket which failed too often."""
        return cls(
            ticket_id=ticket_id,
            rollouts=(),
            generator_id=generator_id,
            finished_version=version,
            lane=lane,
            dead_reason=reason,
        )


def version_spans(weights: Iterable[Weights]) -> tuple[VersionSpan, ...]:
    """Return the run-length encoding of the weights of each token."""
    return tuple(VersionSpan(one.version, sum(1 for _ in run), one.lineage) for one, run in groupby(weights))
