"""The conversation of an episode, and its loops between a model and an environment's worker.

A talk that has no turn left raises BudgetSpent: the episode ends, and is scored if the environment can.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from asyncrl.environments.base import Answer, BudgetSpent, Message, Opening, Outcome, Talk, ToolCall
from asyncrl.environments.returned import Observation, read_done, read_reset, read_reward, read_step
from asyncrl.environments.tool_schemas import Toolbox
from asyncrl.errors import EnvironmentFault

# What is counted where there are tools.
TOOL_COUNTS = ("tools/calls", "tools/invalid", "tools/late", "tools/raised")
# Sends a request to the worker of the episode, and returns its reply. Raises EnvironmentFault.
Ask = Callable[..., Awaitable[Mapping[str, Any]]]


class Conversation:
    """Messages for a model with a chat template, text for one without; the prompt says which."""

    def __init__(self, talk: Talk, opening: Opening, max_characters: int) -> None:
        """Begin with the row's prompt. Longer observations are cut, with a mark at the end."""
        self.talk = talk
        self._text = opening if isinstance(opening, str) else None
        self._messages: list[Message] = [] if isinstance(opening, str) else list(opening)
        self.max_characters = max_characters
        # Numbers for the episode's metrics. A mean over episodes needs the zeros.
        self.counts: Counter[str] = Counter({"turns": 0, "observations/cut": 0})

    def outcome(self, finish_reason: str, reward: float | None = None) -> Outcome:
        """Return the end of the episode, with the counts as metrics."""
        metrics = {name: float(count) for name, count in self.counts.items()}
        return Outcome(finish_reason=finish_reason, reward=reward, metrics=metrics)

    def observe(self, observation: Observation) -> None:
        """Append what the environment says. Text continues the user's message if that is the last one."""
        if observation is None:
            return
        if self._text is not None:
            if not isinstance(observation, str):
                text = "the environment returned messages, but the model has no chat template; return text"
                raise EnvironmentFault(text, reason="returned")
            self._text += self.cut(observation)
        elif not isinstance(observation, str):
            self._messages += [dict(one, content=self.cut(one["content"])) for one in observation]
        elif self._messages and self._messages[-1]["role"] == "user":
            last = self._messages[-1]
            both = [last["content"], self.cut(observation)]
            self._messages[-1] = {**last, "content": "\n\n".join(part for part in both if part)}
        else:
            self._messages.append({"role": "user", "content": self.cut(observation)})

    def result(self, call: ToolCall, text: str, length: int) -> None:
        """Append the result of a tool call, `length` characters before it was cut to `text`."""
        content = self.cut(text, length)
        self._messages.append(
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
        )

    async def answer(self, tools: Sequence[Mapping[str, Any]] = ()) -> Answer:
        """Return the model's next answer, and append it. Raises what the talk raises."""
        if self._text is not None:
            if tools:
                text = "the environment has tools, which only a chat template shows to a model"
                raise EnvironmentFault(f"{text}; set model.chat_template: true", reason="start")
            text, self._text = self._text, ""
            answer = await self.talk.complete(text)
        else:
            if not self._messages:
                text = (
                    "the model is shown nothing: the row has no prompt, and `reset` returned no observation"
                )
                raise EnvironmentFault(text, reason="returned")
            self.counts.update(dict.fromkeys(TOOL_COUNTS if tools else (), 0))
            answer = await self.talk.chat(self._messages, tools=tools)
            self._messages = [*self._messages, answer.message]
        self.counts["turns"] += 1
        return answer

    def cut(self, text: str, length: int | None = None) -> str:
        """Return the beginning of a text that is too long, with a mark that the model can read."""
        length = len(text) if length is None else length
        if length <= self.max_characters:
            return text
        self.counts["observations/cut"] += 1
        left = length - self.max_characters
        return f"{text[: self.max_characters]}\n[cut: {left:,} of {length:,} characters]"


async def asked(ask: Ask, do: str, **arguments: Any) -> Mapping[str, Any]:
    """Return a reply of the environment. Raises EnvironmentFault, also if its method raised."""
    reply = await ask({"do": do, **arguments})
    if "error" in reply:
        raise EnvironmentFault(f"`{do}` raised {reply['error']} ({reply['where']})")
    return reply


async def play_text(
    conversation: Conversation, ask: Ask, start: Mapping[str, Any], *, rewards: bool
) -> Outcome:
    """Play a text environment: an answer is the argument of `step`, whose observation comes next."""
    observation, state = read_reset(await asked(ask, "reset", **start, limit=conversation.max_characters))
    conversation.observe(observation)
    total: float | None = None
    finish_reason = ""
    try:
        while not finish_reason:
            answer = await conversation.answer()
            reply = await asked(ask, "step", text=answer.text, limit=conversation.max_characters)
            step = read_step(reply)
            if step.reward is not None:
                total = (total or 0.0) + step.reward
            conversation.talk.score_turn(step.reward, state)
            state = step.state
            if step.done:
                # An answer that was cut off may have ended the episode by chance.
                finish_reason = "turns" if step.truncated else answer.finish_reason
            else:
                # Without a message behind it, the model would be asked to continue its own answer.
                conversation.observe(step.observation or "")
    except BudgetSpent as spent:
        finish_reason = spent.finish_reason
    if rewards:
        last = read_reward("reward", (await asked(ask, "reward"))["value"])
        if last is not None:
            total = (total or 0.0) + last
    return conversation.outcome(finish_reason, total)


async def play_tools(conversation: Conversation, toolbox: Toolbox, ask: Ask, *, step_s: float) -> Outcome:
    """Play with tools that have no state: calls of one answer run at the same time.

    The model may have asked for an endless computation, so a call that takes too long is an observation.
    """

    async def answer_calls(answer: Answer) -> bool:
        called = [_called(conversation, toolbox, ask, call) for call in answer.tool_calls]
        replies = await asyncio.gather(*called, return_exceptions=True)
        for call, reply in zip(answer.tool_calls, replies, strict=True):
            _observe(conversation, call, reply, step_s)
        return False

    return conversation.outcome(await _until_no_call(conversation, toolbox, answer_calls))


async def play_tool_class(
    conversation: Conversation, toolbox: Toolbox, ask: Ask, start: Mapping[str, Any], *, rewards: bool
) -> Outcome:
    """Play with the methods of one object as tools: calls run in order, and a lost object is a fault.

    After the calls of each answer the object is asked whether the episode is over, because `__init__`,
    `reset` or a tool may set the attribute that says so.
    """
    observation, _ = read_reset(await asked(ask, "reset", **start, limit=conversation.max_characters))
    conversation.observe(observation)

    async def answer_calls(answer: Answer) -> bool:
        for call in answer.tool_calls:
            _observe(conversation, call, await _called(conversation, toolbox, ask, call), 0.0)
        return read_done((await asked(ask, "done"))["value"])

    finish_reason = await _until_no_call(conversation, toolbox, answer_calls)
    reward = read_reward("reward", (await asked(ask, "reward"))["value"]) if rewards else None
    return conversation.outcome(finish_reason, reward)


async def _until_no_call(
    conversation: Conversation, toolbox: Toolbox, answer_calls: Callable[[Answer], Awaitable[bool]]
) -> str:
    """Talk until an answer has no call or `answer_calls` says that the episode is over."""
    try:
        while True:
            answer = await conversation.answer(toolbox.schemas)
            if not answer.tool_calls or await answer_calls(answer):
                return answer.finish_reason
    except BudgetSpent as spent:
        return spent.finish_reason


async def _called(
    conversation: Conversation, toolbox: Toolbox, ask: Ask, call: ToolCall
) -> Mapping[str, Any] | str:
    """The reply to a call, or the model's mistake."""
    if mistake := toolbox.mistake(call):
        return mistake
    asked_for = {"name": call.name, "arguments": call.arguments, "limit": conversation.max_characters}
    return await ask({"do": "call", **asked_for})


def _observe(
    conversation: Conversation,
    call: ToolCall,
    reply: Mapping[str, Any] | str | BaseException,
    step_s: float,
) -> None:
    """Append the result of a call, or the model's mistake. Raises EnvironmentFault for what is not one."""
    conversation.counts["tools/calls"] += 1
    if isinstance(reply, str):
        conversation.counts["tools/invalid"] += 1
        text = f"error: {reply}"
    elif isinstance(reply, EnvironmentFault) and reply.reason == "hung":
        conversation.counts["tools/late"] += 1
        text = f"error: {call.name} took longer than {step_s:g} s and was stopped"
    elif isinstance(reply, BaseException):
        raise reply
    elif "error" not in reply:
        conversation.result(call, reply["value"], reply["length"])
        return
    elif reply["fault"]:
        raise EnvironmentFault(f"tool `{call.name}` raised {reply['error']} ({reply['where']})")
    else:
        conversation.counts["tools/raised"] += 1
        text = f"error: {reply['error']}"
    conversation.result(call, text, len(text))
