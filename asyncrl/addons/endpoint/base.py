"""A call of the model, and the interface of the dialects in which agents write it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.environments.base import Answer, Message

Json = Mapping[str, Any]
Event = tuple[str, Json | str]
"""The name of a server-sent event, "" for none, and its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What an agent asks, in the form of OpenAI's chat messages."""

    model: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    calls_tools: bool = True  # otherwise the calls in the answer stay text
    prompt: str | None = None  # plain text instead of messages
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()  # texts that end the answer
    choices: int = 1
    logprobs: bool = False  # whether the answer has the log-probabilities of its tokens
    streams: bool = False
    streams_usage: bool = False  # whether a stream ends with the usage
    overridden: tuple[str, ...] = ()  # parameters that have no effect, because sampling is the run's
    constraints: tuple[str, ...] = ()  # parameters that would constrain what the model may sample
    openings: int = 0  # messages at the start that a call which continues this one does not repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A call and its answer, to which a later call may refer."""

    call: Call
    message: Message  # the first answer as a message
    answer: Json  # as it was written


Recall = Callable[[str], Past]
"""The call whose answer has an id, or has an item with this id. Raises Refused."""


class Refused(Exception):
    """A call that gets no answer. The status and the text go to the agent."""

    def __init__(self, status: int, text: str, code: str) -> None:
        """Take the HTTP status, and a short name of the reason."""
        super().__init__(text)
        self.status = status
        self.code = code


class Dialect(Protocol):
    """One interface of agents: how a call is read and an answer is written."""

    keys: frozenset[str]
    """Parameters that are served, or change neither the conversation nor what is sampled."""

    def read(self, body: Json, recall: Recall) -> Call:
        """Return the call. Raises Refused."""

    def write(self, call: Call, answers: Sequence[Answer], number: str) -> Json:
        """Return the answer; `number` is its id."""

    def events(self, call: Call, answer: Json) -> Iterator[Event]:
        """Yield a written answer as a stream."""

    def error(self, refused: Refused) -> Json:
        """Return the body of a refusal."""


def now_s() -> int:
    """Return Unix seconds, as answers carry them for display."""
    return int(time.time())
