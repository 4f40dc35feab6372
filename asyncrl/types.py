"""The nouns of the system. Read this file first; docs/glossary.md has every word of the project.

prompt       what to answer, with the dataset row that rewards judge by
ticket       leave to sample one prompt `group_size` times; a dense integer id, kept over retries
rollout      one sampled response with the behaviour log-probability and policy version of every token
group        the rollouts of one ticket; the atom of the buffer: it arrives whole or not at all
version      how many optimizer steps made the weights; owned by the learner
lineage      which start of the learner made them: after a return to a checkpoint the same version comes again, as other weights
history      the lineages that led to the weights being trained, each up to a version
lag          version being trained minus version of the token, in optimizer steps

Arrays are numpy, because they cross processes: torch begins in the learner.
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
        """Those that sampled them."""
        return Weights(self.version, self.lineage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Leave to sample one prompt; the prompt follows from the id, the dataset and the seed."""

    # Dense, from 1: the position in the sample plan.
    id: int
    # The oldest weights that may start it: older ones would break the staleness bound.
    minimum_version: int
    # Of the learner that issued it: other weights must not start it.
    history: History = INITIAL


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """What one ticket asks for."""

    token_ids: tuple[int, ...]
    text: str
    # The dataset row: what reward functions judge by.
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One response to one prompt, with what is needed to correct for its age."""

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    # True where the policy sampled the token, False for tool and user text. Same length as `response_ids`.
    action_mask: NDArray[np.bool_]
    # ln pi_behaviour of each response token, in nats, temperature included; 0 where it is no action.
    behaviour_logprobs: NDArray[np.float32]
    # Run-length encoded weights of each response token; the lengths add up to the response.
    version_spans: tuple[VersionSpan, ...]
    # `stop` or `length`.
    finish_reason: str
    # Weighted sum of `reward_parts`, as the reward functions gave it; never overwritten.
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    # What a reward function took out of the response as its answer; empty: there is none in it; None: no
    # function says.
    answer: str | None = None

    def __post_init__(self) -> None:
        lengths = {
            "response_ids": len(self.response_ids),
            "action_mask": len(self.action_mask),
            "behaviour_logprobs": len(self.behaviour_logprobs),
            "version_spans": sum(span.tokens for span in self.version_spans),
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"rollout columns differ in length: {lengths}; one entry per response token is needed")

    @property
    def versions(self) -> NDArray[np.int64]:
        """Policy version of every response token."""
        return np.repeat(
            np.array([span.version for span in self.version_spans], dtype=np.int64),
            np.array([span.tokens for span in self.version_spans], dtype=np.int64),
        )


def time_of_day() -> float:
    """Unix seconds, for people to look at. Nothing is decided by it: clocks are set, and hosts disagree."""
    return time.time()


class GroupTimes(NamedTuple):
    """When a generator did what, by its own `time_of_day`."""

    leased_at: float
    # When the weights were there that it may be sampled with.
    sampling_at: float
    # When it was handed over, for the first time.
    put_at: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The rollouts of one ticket, or the reason why it died."""

    ticket_id: int
    rollouts: tuple[Rollout, ...]
    generator_id: str
    # The generator's policy version when the group was complete: splits lag into in-flight and in-queue.
    finished_version: int
    sampling_s: float = 0.0
    reward_s: float = 0.0
    # Unknown of dead groups, and of those that were sampled outside of a run.
    times: GroupTimes | None = None
    # The stream of tickets that the id counts in: the same number is another prompt in another one.
    lane: str = "train"
    # Reward of the greedy response to the same prompt, for an advantage that needs one as its baseline.
    greedy_reward: float | None = None
    # Set on a group without rollouts: the ticket failed too often; it is counted, not trained.
    dead_reason: str | None = None

    @classmethod
    def dead(cls, ticket_id: int, reason: str, *, generator_id: str, version: int, lane: str = "train") -> Self:
        """A tombstone: takes the place of a group whose ticket failed too often."""
        return cls(
            ticket_id=ticket_id,
            rollouts=(),
            generator_id=generator_id,
            finished_version=version,
            lane=lane,
            dead_reason=reason,
        )


def version_spans(weights: Iterable[Weights]) -> tuple[VersionSpan, ...]:
    """Run-length encoding of per-token weights."""
    return tuple(VersionSpan(one.version, sum(1 for _ in run), one.lineage) for one, run in groupby(weights))
