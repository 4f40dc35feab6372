"""A worker that plays many rollouts, `async def rollout(session, **columns)`, on one asyncio loop.

`start`, `cancel` and `episode` number the episodes, `call` numbers what one asks of the model.

    in   {start, columns, seed, place} | {cancel} | {ping}
         {call, answer: the fields of `Answer` without `logprobs`} | {call, spent: finish reason}
    out  {call, episode, messages, tools, train} | {call, episode, text} | {episode, reward, state} | {pong}
         {episode, value, metrics} | {episode, spent: finish reason, metrics} | {episode, error, where, fault}
"""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from asyncrl.environments.base import Answer, BudgetSpent, Message, ToolCall
from asyncrl.environments.json_frames import packed, take_frames
from asyncrl.environments.player import described
from asyncrl.environments.user_code import describe_tool

READ_BYTES = 1 << 18
_MESSAGE = '{"role": ..., "content": ...}'
_SCHEMA = '{"type": "function", "function": {"name": ..., "parameters": ...}}'


class Session:
    """The first argument of a rollout: the model, in one episode."""

    def __init__(self, host: "RolloutHost", number: int, *, seed: int, episode: int) -> None:
        """Stand for episode `number` of the host."""
        self._host, self._number = host, number
        # Equal for all episodes of a group.
        self.seed = seed
        # Place in the group, from 0.
        self.episode = episode
        # Small named numbers of the episode, for the run's metrics `environment/<name>`.
        self.metrics: dict[str, float] = {}

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Callable[..., Any] | Mapping[str, Any]] = (),
        train: bool = True,
    ) -> Answer:
        """Return the model's answer to a conversation. `tools` are functions or JSON schemas.

        With `train=False` the answer is not trained, for example that of a judge.
        Raises BudgetSpent if no turn is left. A rollout may let it pass; then the episode has no reward.
        Raises TypeError for a tool that is neither, and for what is not a list of messages.
        """
        if not isinstance(messages, list | tuple) or not all(
            isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in messages
        ):
            found = f"found {messages!r:.80}; session.chat takes a list of messages {_MESSAGE}"
            raise TypeError(f"{found}; a model without a chat template takes text, by session.complete")
        for tool in tools:
            if isinstance(tool, Mapping) and "function" not in tool:
                raise TypeError(f"found the tool {tool!r:.80}; as a schema it is {_SCHEMA}")
        offered = [tool if isinstance(tool, Mapping) else describe_tool(tool) for tool in tools]
        question = {"messages": list(messages), "tools": offered, "train": bool(train)}
        return await self._host.ask({**question, "episode": self._number})

    async def complete(self, text: str) -> Answer:
        """Return the model's answer to everything before, with `text` appended as it is.

        Raises BudgetSpent if no turn is left, and TypeError for what is not text.
        """
        if not isinstance(text, str):
            text = f"found {text!r:.80}; session.complete takes text, and session.chat takes messages"
            raise TypeError(text)
        return await self._host.ask({"text": text, "episode": self._number})

    def score_turn(self, reward: float | None, state: object = None) -> None:
        """Give the last turn a reward, if any, and name the state that it started from by a value of JSON."""
        self._host.tell({"reward": reward, "state": state, "episode": self._number})


def _spent(error: BaseException) -> str:
    """The finish reason, if spent budgets are all that ended a rollout; a task group wraps them."""
    while isinstance(error, BaseExceptionGroup) and error.split(BudgetSpent)[1] is None:
        error = error.exceptions[0]
    return error.finish_reason if isinstance(error, BudgetSpent) else ""


class RolloutHost:
    """Starts and cancels the episodes of its parent, and carries their questions to the model."""

    def __init__(self, channel: socket.socket, rollout: Callable[..., Any]) -> None:
        """Play the episodes of one function."""
        self._channel, self._rollout = channel, rollout
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._calls = 0

    async def serve(self) -> NoReturn:
        """Follow messages until the socket ends, which raises EOFError."""
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        arrived = bytearray()
        while data := await reader.read(READ_BYTES):
            arrived += data
            for message in take_frames(arrived):
                self._follow(message)
        raise EOFError

    async def ask(self, question: Mapping[str, Any]) -> Answer:
        """Return the model's answer. Raises BudgetSpent; TypeError and ValueError for what JSON has not."""
        self._calls += 1
        call = self._calls
        self.tell({"call": call, **question})
        self._asked[call] = asyncio.get_running_loop().create_future()
        try:
            return await self._asked[call]
        finally:
            del self._asked[call]

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message to the parent."""
        self._writer.write(packed(message))

    def _follow(self, message: dict[str, Any]) -> None:
        if "ping" in message:
            self.tell({"pong": message["ping"]})
        elif "start" in message:
            number = message["start"]
            self._episodes[number] = asyncio.create_task(self._play(number, message))
        elif "cancel" in message:
            if message["cancel"] in self._episodes:
                self._episodes[message["cancel"]].cancel()
        elif (asked := self._asked.get(message["call"])) is None or asked.done():
            return  # its episode was cancelled
        elif "spent" in message:
            asked.set_exception(BudgetSpent(message["spent"]))
        else:
            fields = message["answer"]
            calls = tuple(ToolCall(**call) for call in fields.pop("tool_calls"))
            asked.set_result(Answer(tool_calls=calls, **fields))

    async def _play(self, number: int, start: Mapping[str, Any]) -> None:
        session = Session(self, number, seed=start["seed"], episode=start["place"])
        try:
            try:
                end = {"value": await self._rollout(session, **start["columns"])}
            except BaseException as error:
                if not (spent := _spent(error)):
                    raise
                end = {"spent": spent}
            self.tell({"episode": number, **end, "metrics": dict(session.metrics)})
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            self.tell({"episode": number} | described(error))
        finally:
            del self._episodes[number]
