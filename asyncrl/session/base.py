"""The nouns of a session, and the interface to a tokenizer with its chat template."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.session.chat_messages import Message
from asyncrl.types import Rollout


class Renderer(Protocol):
    """A tokenizer and its chat template."""

    stop_ids: frozenset[int]
    """Tokens that end a response."""

    special_texts: frozenset[str]
    """The texts of all special tokens, which `encode` turns into these tokens wherever they occur."""

    opening_ids: tuple[int, ...]
    """Tokens that the tokenizer puts before plain text, such as BOS; a template writes its own."""

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, generation: bool) -> str:
        """Return the template's text, with the opening of the next answer if `generation`.

        If the last message is the beginning of an answer, the opening ends with it.
        Raises RenderError if the template refuses the messages.
        """

    def encode(self, text: str, *, inside: bool = False) -> list[int]:
        """Return the ids of `text`; no special token is added.

        With `inside` they are those that it has behind other text: some tokenizers put a blank before a text.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with special tokens."""


def without_stop(renderer: Renderer, ids: Sequence[int]) -> list[int]:
    """Return the ids of an answer without the stop token at their end, if there is one."""
    found = list(ids)
    return found[:-1] if found and found[-1] in renderer.stop_ids else found


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """A message and what was said before it, which the turns of a conversation share."""

    before: "Said | None"
    message: Message

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the conversation, which ends with this message."""
        found: list[Message] = []
        said: Said | None = self
        while said is not None:
            found.append(said.message)
            said = said.before
        return tuple(found[::-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What the engine is asked: the ids before one answer, and where the answer stands in the tree."""

    prompt_ids: tuple[int, ...]
    parent: "Turn | None"  # the turn that is continued; None: the request begins a sequence
    delta_ids: tuple[int, ...]  # the end of `prompt_ids` that is behind the parent's last token
    rule: str  # how the delta was found; a key of `Session.counts`
    broken_specials: int = 0  # texts of special tokens in the messages that were broken
    said: Said | None = None  # the conversation before the answer; None for plain text
    key: bytes | None = None  # of the conversation before the answer; None for plain text
    begun_key: bytes | None = None  # of the conversation before the beginning of the answer, if it has one


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One recorded answer. `reward` and `state` may be set until the session is flattened."""

    index: int  # in the order of recording, from 0
    parent: "Turn | None"
    delta_ids: tuple[int, ...]  # prompt ids behind the parent's last token; for a root, the whole prompt
    prompt_digest: bytes  # of the prompt ids that the engine reported
    rollout: Rollout  # as the engine gave it, but only a root has its prompt: the others would repeat it
    message: Message
    said: Said | None  # the conversation up to and with `message`; None for plain text
    is_trained: bool
    reward: float | None = None
    state: int | None = None  # hash of the environment's state before the turn
    children: int = 0

    @property
    def sampled_ids(self) -> NDArray[np.int32]:
        """Return the ids that the policy sampled."""
        return self.rollout.response_ids

    @property
    def path(self) -> "list[Turn]":
        """Return the turns from the root to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def ids(self) -> tuple[int, ...]:
        """Return all token ids up to the end of the answer."""
        return tuple(one for turn in self.path for one in (*turn.delta_ids, *turn.sampled_ids.tolist()))


class Parsed(NamedTuple):
    """What a parser found. Arguments of a call are a JSON value, or the text that is not JSON."""

    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


# From the text with its special tokens, the ids, the ids of the prompt, and the tools. Raises ValueError.
Parse = Callable[[str, Sequence[int], Sequence[int], Sequence[Message]], Parsed]
# From the text with its special tokens, and the end of the prompt: the reasoning, and the text without it.
Split = Callable[[str, str], tuple[str, str]]
