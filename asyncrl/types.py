"""The nouns of the system. Read this file first; docs/glossary.md has every word of the project.

* Prompt: the text to answer, with the dataset row from which rewards are computed.
* Ticket: the permission to sample one prompt `group_size` times, with an integer id.
* Rollout: one sampled response, with each token's behaviour log-probability and policy version.
* Group: all rollouts of one ticket; the buffer stores it whole or not at all.
* Version: the number of optimizer steps that made the weights.
* Lineage: the start of the learner that made a version; see `asyncrl/lineage.py`.
* Lag: version being trained minus version of a token, in optimizer steps.

Arrays are numpy, because they cross processes; only the learner uses torch.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.lineage import INITIAL, History, Weights


class VersionSpan(NamedTuple):
    """`tokens` consecutive response tokens that were sampled by the same weights."""

    version: int
    tokens: int
    lineage: int = 0

    @property
    def weights(self) -> Weights:
        """The name of the weights that sampled the tokens."""
        return Weights(self.version, self.lineage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The permission to sample one prompt, which is determined by the id, the dataset and the seed."""

    # The position in the sample plan, from 1, without gaps. A ticket keeps it when it is tried again.
    id: int
    # The oldest weights that may start the ticket: older ones would break the staleness bound.
    minimum_version: int
    # History of the learner that issued the ticket: only weights in it may start the ticket.
    history: History = INITIAL


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """The prompt of one ticket."""

    token_ids: tuple[int, ...]
    text: str
    # The dataset row, whose columns reward functions get.
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One response to one prompt. Per-token columns have the length of `response_ids`."""

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    # True where the policy sampled the token, False for tool and user text.
    action_mask: NDArray[np.bool_]
    # ln pi_behaviour of each token, in nats, after temperature; 0 where the token is no action.
    behaviour_logprobs: NDArray[np.float32]
    # The weights that sampled each token, run-length encoded.
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str  # `stop` or `length`
    # Weighted sum of `reward_parts`, before shaping; never overwritten.
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    # The answer that a reward function found in the response; "" if it found none, None if no function looks
    # for one.
    answer: str | None = None

    def __post_init__(self) -> None:
        lengths = {
            "response_ids": len(self.response_ids),
            "action_mask": len(self.action_mask),
            "behaviour_logprobs": len(self.behaviour_logprobs),
            "version_spans": sum(span.tokens for span in self.version_spans),
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"rollout columns differ in length: {lengths}; one entry per response token is needed"
            )

    @property
    def versions(self) -> NDArray[np.int64]:
        """Policy version of every response token."""
        return np.repeat(
            np.array([span.version for span in self.version_spans], dtype=np.int64),
            np.array([span.tokens for span in self.version_spans], dtype=np.int64),
        )


def time_of_day() -> float:
    """Unix seconds, for display only: clocks are adjusted, and the clocks of hosts differ."""
    return time.time()


class GroupTimes(NamedTuple):
    """Times in the life of a group, by the generator's `time_of_day`."""

    leased_at: float
    sampling_at: float  # the generator had weights that may start the ticket
    put_at: float  # the first attempt to store the group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The rollouts of one ticket, or the reason why there are none."""

    ticket_id: int
    rollouts: tuple[Rollout, ...]
    generator_id: str
    # The generator's policy version when the group was complete; it splits lag into in-flight and in-queue.
    finished_version: int
    sampling_s: float = 0.0
    reward_s: float = 0.0
    # None for dead groups, and for groups sampled outside of a run.
    times: GroupTimes | None = None
    # The stream of tickets to which the id belongs; an id stands for another prompt in another lane.
    lane: str = "train"
    # Reward of the greedy response to the same prompt, if the advantage uses it as baseline.
    greedy_reward: float | None = None
    # Why the group has no rollouts: its ticket failed too often. Such a group is counted and not trained.
    dead_reason: str | None = None

    @classmethod
    def dead(
        cls, ticket_id: int, reason: str, *, generator_id: str, version: int, lane: str = "train"
    ) -> Self:
        """A group without rollouts, which takes the place of one whose ticket failed too often."""
        return cls(
            ticket_id=ticket_id,
            rollouts=(),
            generator_id=generator_id,
            finished_version=version,
            lane=lane,
            dead_reason=reason,
        )


def version_spans(weights: Iterable[Weights]) -> tuple[VersionSpan, ...]:
    """The run-length encoding of the weights of each token."""
    return tuple(VersionSpan(one.version, sum(1 for _ in run), one.lineage) for one, run in groupby(weights))
