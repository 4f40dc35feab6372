"""An agent that talks at random over a session, and an engine that answers with arbitrary tokens.

The agent does what agents do: it goes on, asks again, goes back and takes another way, starts sub-agents,
drops reasoning and renames calls. It keeps its own book of every call, from which tests compute what the
session must give.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.session.base import Renderer, Request, Turn
from asyncrl.session.tree import Session
from asyncrl.types import Rollout, VersionSpan

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "description": "a number"} for name in ("a", "b")},
            "required": ["a", "b"],
        },
    },
}
WORDS = [
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "carry",
    "the",
    "ball",
    "over",
    "this",
    "hill",
    "17",
    "4",
    "again",
]


@dataclass(kw_only=True, eq=False)
class Call:
    """One call of the model as the agent's book has it."""

    before: "Call | None"  # the call whose answer it continues
    request: Request
    rollout: Rollout
    new: list[dict[str, Any]]  # the messages behind the conversation of `before`
    conversation: list[dict[str, Any]]  # with the answer
    tools: tuple[Mapping[str, Any], ...]
    turn: Turn


@dataclass(kw_only=True)
class Agent:
    """Talks over one session. Without `with_tools` it never offers any."""

    renderer: Renderer
    vocabulary: Sequence[int]  # ids without special tokens
    draw: random.Random
    session: Session
    with_tools: bool = True
    calls: list[Call] = field(default_factory=list)
    texts: int = 0

    def play(self, calls: int) -> None:
        """Make this many calls of the model."""
        for _ in range(calls):
            self.step()

    def step(self) -> None:
        kind = self.draw.random()
        if not self.calls or kind < 0.08:  # a sub-agent, or a summary
            tools = (TOOL,) if self.with_tools and self.draw.random() < 0.7 else ()
            system = [{"role": "system", "content": self.words()}] * self.draw.randint(0, 1)
            self.call(None, [*system, {"role": "user", "content": self.words()}], tools)
        elif kind < 0.18:  # the same request again
            old = self.draw.choice(self.calls)
            self.call(old.before, old.new, old.tools)
        else:
            last = self.calls[-1] if kind < 0.8 else self.draw.choice(self.calls)
            self.call(last, self.reaction(last.conversation[-1]), last.tools)

    def reaction(self, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": self.words()}
            for call in answer.get("tool_calls", ())
        ]
        return results or [{"role": "user", "content": self.words()}]

    def call(self, before: Call | None, new: list[dict[str, Any]], tools: tuple[Any, ...]) -> None:
        history = before.conversation if before else []
        request = self.session.request([*map(self.replayed, history), *new], tools=tools)
        rollout = self.sample(request.prompt_ids)
        answer = self.answer(rollout, bool(tools))
        turn = self.session.record(request, rollout, answer)
        self.calls.append(
            Call(
                before=before,
                request=request,
                rollout=rollout,
                new=new,
                conversation=[*history, *new, answer],
                tools=tools,
                turn=turn,
            )
        )

    def sample(self, prompt_ids: Sequence[int]) -> Rollout:
        """Arbitrary tokens, which no tokenizer would give; one in five answers is cut off."""
        ids = self.draw.choices(self.vocabulary, k=self.draw.randint(3, 9))
        is_whole = self.draw.random() < 0.8
        if is_whole:
            ids.append(self.draw.choice(sorted(self.renderer.stop_ids)))
        first = self.draw.randint(0, len(ids))
        spans = [VersionSpan(len(self.calls), first), VersionSpan(len(self.calls) + 1, len(ids) - first, 1)]
        return Rollout(
            prompt_ids=np.array(prompt_ids, dtype=np.int32),
            response_ids=np.array(ids, dtype=np.int32),
            action_mask=np.ones(len(ids), dtype=np.bool_),
            behaviour_logprobs=np.array([-self.draw.random() - 1e-6 for _ in ids], dtype=np.float32),
            version_spans=tuple(span for span in spans if span.tokens),
            finish_reason="stop" if is_whole else "length",
        )

    def answer(self, rollout: Rollout, may_call: bool) -> dict[str, Any]:
        text = self.renderer.decode(rollout.response_ids[:-1].tolist())
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.draw.random() < 0.3:
            message["reasoning_content"] = self.words()
        if may_call and self.draw.random() < 0.5:
            number = f"call{len(self.calls):05}"
            arguments = {"a": self.draw.randint(0, 99), "b": len(self.calls)}
            function = {"name": "add", "arguments": arguments}
            message["tool_calls"] = [{"id": number, "type": "function", "function": function}]
            message["content"] = text if self.draw.random() < 0.5 else ""
        return message

    def replayed(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as an agent library sends it back."""
        copy = json.loads(json.dumps(message))
        if copy["role"] == "assistant" and self.draw.random() < 0.5:
            copy.pop("reasoning_content", None)
            for call in copy.get("tool_calls", ()):
                call["id"] = f"renamed{self.draw.randint(0, 9)}"
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], indent=1)
            if "tool_calls" in copy:
                copy["content"] = copy["content"].strip() or None
        elif self.draw.random() < 0.2:
            copy["content"] = [{"type": "text", "text": copy["content"]}]
        return copy

    def words(self) -> str:
        """Some words with a number of their own, and now and then the text of a special token."""
        self.texts += 1
        words = [*self.draw.choices(WORDS, k=self.draw.randint(1, 6)), f"n{self.texts}"]
        if self.draw.random() < 0.1:
            words.append(self.draw.choice(sorted(self.renderer.special_texts)))
        return " ".join(words)
