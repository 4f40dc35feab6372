"""Reward functions, and the interface of a scorer, which calls them.

A reward function is any callable

    def reward(prompt: str, response: str, **columns) -> float | tuple[float, str | None] | None

It gets the columns of the dataset row that it names (or all with `**columns`), and may be `async`. With an
environment there are further columns (`EPISODE_COLUMNS`), and the response is the last answer. With
`responses` in place of `response` it gets those of a group and returns a list (see `forms`). It returns
a finite number, or a pair of the number and the answer in the response (None without one), for votes. None
in place of the number abstains: the other functions score the response. If a function raises, hangs or
returns anything else, or if all abstain, the ticket fails; that is never a score of 0.

Other rewards are computed by a service, behind an address or in a process of the run. Their `Service` says
what is asked about a response. It obeys the same rule: a question without a good answer fails the ticket.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from asyncrl.algo.ranges import MOST_REWARD
from asyncrl.config.reward_section import RewardFunctionConfig
from asyncrl.errors import RewardError
from asyncrl.rewards.forms import EPISODE_COLUMNS as EPISODE_COLUMNS
from asyncrl.rewards.forms import checked_reward

# The error if no function scores a response.
ABSTAINED = (
    "every reward function returned None for a response, so nothing scores it; return a number from one of "
    "them, or remove such rows from the data"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """The input of every reward function."""

    prompt: str
    response: str
    # The dataset row, whose columns become arguments.
    row: Mapping[str, Any]
    # The prompt as the row has it, if that is a list of chat messages.
    chat: Sequence[Mapping[str, Any]] | None = None
    # Further columns of an episode, `EPISODE_COLUMNS`, which take the place of the row's.
    played: Mapping[str, Any] = field(default_factory=dict)
    # Decodes the response with its special tokens, but without the stop token at its end, for functions that
    # take this argument; None if it has none.
    raw_response: Callable[[], str] | None = None
    # Whether the response was cut off at the length limit.
    truncated: bool = False
    # Number of tokens that the policy sampled.
    response_tokens: int = 0
    # Prompt and response as the policy read and sampled them; in an episode its last sequence.
    token_ids: Sequence[int] = ()

    @property
    def columns(self) -> Mapping[str, Any]:
        """Return the columns of row and episode."""
        return {**self.row, **self.played}

    def measured(self, *, raw: bool) -> dict[str, Any]:
        """Return the columns with what was measured in place of those of the same names.

        `raw_response`, which costs a second decoding, is only there if it is `raw`.
        """
        found = {**self.columns, "truncated": self.truncated, "response_tokens": self.response_tokens}
        if raw:
            found["raw_response"] = self.raw_response() if self.raw_response else self.response
        return found


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge was asked about a response, and its answer, for people to read."""

    part: str
    prompt: str
    answer: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One scored response."""

    # Sum of weight times part, over the parts that there are.
    total: float
    # Unweighted parts, by name, of the functions that did not abstain.
    parts: Mapping[str, float]
    # As in `Rollout`; the first one, if several functions return answers.
    answer: str | None = None
    # One for each question to a judge.
    judgements: tuple[Judgement, ...] = ()


class Scorer(Protocol):
    """Scores the responses of a group."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """One score per input, without parts if all functions abstain.

        Raises RewardError if a function raises, hangs, or returns anything else.
        """
        ...

    async def close(self) -> None: ...


class Unanswered(RewardError):
    """A service did not answer a question, or not with a number."""

    def __init__(
        self, message: str, *, reason: str, may_pass: bool = True, pause_s: float | None = None
    ) -> None:
        """`may_pass` if asking again could help; `pause_s` is the time until then that the service names."""
        super().__init__(message)
        # In metrics: `limited`, `unavailable`, `refused`, `unreadable`, or `late`.
        self.reason = reason
        self.may_pass = may_pass
        self.pause_s = pause_s


def unreadable(found: str) -> Unanswered:
    """The failure of an answer that holds no score."""
    return Unanswered(f"got {found}", reason="unreadable")


def number(found: object) -> float:
    """The score in an answer. Raises Unanswered."""
    try:
        return checked_reward(found)
    except RewardError as error:
        raise Unanswered(str(error), reason="unreadable") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request to a service. Equal requests have equal answers."""

    # As JSON or msgpack can hold it.
    request: Mapping[str, Any]
    # Returns (score, words of a judge) of an answer, or raises Unanswered; `number` checks a score. None in
    # place of the score abstains. A teacher's score is an array.
    read: Callable[[Any], tuple[Any, str]]
    # The question in words, to a judge.
    prompt: str = ""
    # Number among the votes on one question; the two orders of a pair are votes of their own.
    vote: int = 0


class Service(Protocol):
    """Computes one part of the reward. `opened.Asker` asks it, and repeats, counts and remembers."""

    # Whether a question that was answered before need not be asked.
    remembers: bool

    async def start(self) -> None:
        """Prepare to ask. Raises RewardError for a service that cannot be used."""
        ...

    def questions(self, one: RewardInput) -> list[Question]:
        """The questions about a response, whose mean score is the part. Raises RewardError for a bad row."""
        ...

    async def admit(self, question: Question) -> None:
        """Wait until the service may be asked, at its limit per minute."""
        ...

    async def ask(self, question: Question) -> Any:
        """The answer. Raises Unanswered."""
        ...

    async def close(self) -> None: ...


def scored(
    functions: Sequence[RewardFunctionConfig],
    parts: Mapping[str, float],
    answer: str | None = None,
    judgements: tuple[Judgement, ...] = (),
) -> Score:
    """The score of a response with these parts. Raises RewardError for numbers that are too large."""
    weights = {function.part: function.weight for function in functions}
    # Weights such as 0.7, 0.2 and 0.1 add up to 1, as 1 is what a solved prompt has.
    addends = [weights[name] * value for name, value in parts.items()]
    total = math.fsum(addends) if max(map(abs, addends), default=0.0) <= MOST_REWARD else sum(addends)
    for name, value in (*parts.items(), ("weighted sum", total)):
        if not abs(value) <= MOST_REWARD:
            raise RewardError(
                f"{name} is {value:g}; a reward and its parts are at most {MOST_REWARD:g}; scale it down"
            )
    return Score(total=total, parts=parts, answer=answer, judgements=judgements)


def judgements_json(scores: Sequence[Score]) -> bytes:
    """What judges were asked about responses, and said: a list for each response. Empty without judges."""
    if not any(score.judgements for score in scores):
        return b""
    text = json.dumps([[asdict(one) for one in score.judgements] for score in scores], ensure_ascii=False)
    return text.encode("utf-8", "replace")
