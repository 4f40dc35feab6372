"""A talk whose answers are scripted: the model's side of an episode without a model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.environments.base import Answer, BudgetSpent, Message
from asyncrl.types import Rollout, VersionSpan


class ScriptedTalk:
    """Answers with what a script returns for the text or the messages that the model is shown."""

    def __init__(
        self, script: Callable[[Any], Answer | str] | Sequence[Answer | str], *, max_turns: int = 100
    ) -> None:
        self._script = script if callable(script) else lambda shown, left=list(script): left.pop(0)
        self._left = max_turns
        self.shown: list[Any] = []
        self.tools: list[Sequence[Mapping[str, Any]]] = []
        self.trained: list[bool] = []
        self.rewards: list[tuple[float | None, int | None]] = []

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        train: bool = True,
        **options: Any,
    ) -> Answer:
        self.tools.append(tools)
        self.trained.append(train)
        return self._next([dict(message) for message in messages])

    async def complete(self, text: str, **options: Any) -> Answer:
        return self._next(text)

    def score_turn(self, reward: float | None, state: int | None = None) -> None:
        self.rewards.append((reward, state))

    def _next(self, shown: Any) -> Answer:
        if self._left == 0:
            raise BudgetSpent("turns")
        self._left -= 1
        self.shown.append(shown)
        said = self._script(shown)
        return Answer(text=said) if isinstance(said, str) else said


def rollout_of(prompt_ids, ids, *, version: int = 0) -> Rollout:
    return Rollout(
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        response_ids=np.array(ids, dtype=np.int32),
        action_mask=np.ones(len(ids), dtype=np.bool_),
        behaviour_logprobs=np.full(len(ids), -1.0, dtype=np.float32),
        version_spans=(VersionSpan(version, len(ids)),),
        finish_reason="stop",
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
