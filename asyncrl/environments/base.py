"""The interfaces of an environment, which plays episodes, and of a talk, through which it reaches the model.

An *episode* is one run of an environment. Everything that the model says in it goes through one `Talk`, which
records token ids and log-probabilities as the engine gave them; an environment sees text only.

A failure of the environment is a fault (`EnvironmentFault`): the episode is played again and never scored. A
mistake of the model, such as an unknown tool, is an observation: the model reads it and may do better.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# A chat message as chat templates take it: `role`, `content`, and `tool_calls`, `tool_call_id` or `name`.
Message = Mapping[str, Any]
# A row's prompt: messages for a model with a chat template, otherwise text. Either may be empty.
Opening = str | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool that the model asks for."""

    # Unique in the answer. The result's message carries it as `tool_call_id`.
    id: str
    name: str
    # The arguments by name; the text that the model wrote if it is not a JSON object.
    arguments: Mapping[str, Any] | str

    @property
    def content(self) -> dict[str, Any]:
        """The call as an item of `tool_calls` of the assistant's message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of the model: a turn of the episode."""

    # The answer without its calls and reasoning, as the parser gives it.
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    # `stop`, or `length` if the turn was cut off. A cut-off turn may be the last one: see `BudgetSpent`.
    finish_reason: str = "stop"
    # Number of sampled tokens.
    tokens: int = 0
    # Whether the text has the beginning of a call, and no call could be parsed.
    is_unparsed: bool = False
    # Number of tokens before the answer.
    prompt_tokens: int = 0
    # What a reasoning parser took out of the text.
    reasoning: str = ""
    # The text of `stop` before which the answer was cut off; "" if there was none.
    stop: str = ""
    # Returns the text of each sampled token, without the stop token, and its log-probability in nats.
    logprobs: Callable[[], Sequence[tuple[str, float]]] = field(default=tuple, compare=False, repr=False)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message to append to the conversation, which `Talk.chat` finds again."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.content for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of an episode."""

    # `stop`, or what cut the episode off: `length`, `turns`, `sequences`, `time`.
    finish_reason: str
    # The environment's own reward, finite; None if it gives none.
    reward: float | None = None
    # Parts of the reward by name, for the samples; they need not add up to it.
    parts: Mapping[str, float] = field(default_factory=dict)
    # Small named numbers of the episode, for the metrics.
    metrics: Mapping[str, float] = field(default_factory=dict)


class BudgetSpent(Exception):
    """No further turn: a budget is used up. The episode ends and is scored."""

    def __init__(self, finish_reason: str) -> None:
        """Name the budget: `length`, `turns`, `sequences` or `time`."""
        super().__init__(f"the episode's budget is spent: {finish_reason}")
        self.finish_reason = finish_reason


class Talk(Protocol):
    """The model's side of one episode. Its methods run on the generator's asyncio loop."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        calls_tools: bool = True,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        train: bool = True,
    ) -> Answer:
        """Return the model's answer to the whole conversation.

        The messages begin with those of an earlier call and its answer's `message`, and the turn extends that
        one; other messages begin a new sequence or a branch. `tools` are JSON schemas as chat templates take
        them; with `calls_tools=False` the model sees them, but a call in its answer stays text. `max_tokens`
        may shorten the answer, and it ends before each text of `stop`. With `train=False` it is context only.
        Raises BudgetSpent before sampling if no turn is left, and EngineError.
        """

    async def complete(
        self, text: str, *, max_tokens: int | None = None, stop: Sequence[str] = (), train: bool = True
    ) -> Answer:
        """Return the model's answer to everything before, with `text` appended as it is.

        This serves models without a chat template. Raises BudgetSpent before sampling if no turn is left, and
        EngineError.
        """

    def score_turn(self, reward: float | None, state: int | None = None) -> None:
        """Give the last turn a reward or none, and `returned.state_of` the state that it started from."""


class Environment(Protocol):
    """Plays episodes, any number of them at the same time, on one asyncio loop."""

    async def start(self) -> None:
        """Start the processes. Raises EnvironmentFault if the user's code cannot be loaded or used."""

    async def play(
        self, talk: Talk, row: Mapping[str, Any], *, prompt: Opening, seed: int, episode: int
    ) -> Outcome:
        """Play one episode of a dataset row; cancelling the task kills the episode's process.

        All episodes of a group get the same `seed`, so that they start alike; `episode` counts them from 0.
        Raises EnvironmentFault if the environment failed, and what `talk` raises except BudgetSpent.
        """

    async def close(self) -> None:
        """Kill all processes. The time that it takes is bounded."""
