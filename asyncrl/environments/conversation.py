"""The conversation of an episode: what the model is shown, and what it answered."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.environments.base import Answer, Message, Opening, Talk, ToolCall
from asyncrl.environments.returned import Observation
from asyncrl.errors import EnvironmentFault

# What `loops` counts where there are tools.
TOOL_COUNTS = ("tools/calls", "tools/invalid", "tools/late", "tools/raised")


class Conversation:
    """Messages for a model with a chat template, text for one without; the prompt says which."""

    def __init__(self, talk: Talk, opening: Opening, max_characters: int) -> None:
        """Begin with the row's prompt. Longer observations are cut, with a mark at the end."""
        self._talk = talk
        self._text = opening if isinstance(opening, str) else None
        self._messages: list[Message] = [] if isinstance(opening, str) else list(opening)
        self.max_characters = max_characters
        # Numbers for the episode's metrics. A mean over episodes needs the zeros.
        self.counts: Counter[str] = Counter({"turns": 0, "observations/cut": 0})

    @property
    def metrics(self) -> dict[str, float]:
        """The counts, for the episode's metrics."""
        return {name: float(count) for name, count in self.counts.items()}

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
            answer = await self._talk.complete(text)
        else:
            if not self._messages:
                text = (
                    "the model is shown nothing: the row has no prompt, and `reset` returned no observation"
                )
                raise EnvironmentFault(text, reason="returned")
            self.counts.update(dict.fromkeys(TOOL_COUNTS if tools else (), 0))
            answer = await self._talk.chat(self._messages, tools=tools)
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
