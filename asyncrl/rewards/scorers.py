"""The reward `model_score`: a reward model in a process of the run."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from asyncrl.config.reward_section import ModelScore
from asyncrl.errors import EngineError
from asyncrl.rewards.base import Question, RewardInput, Unanswered

# Seconds after which a call that has no answer is repeated.
ANSWER_S = 5.0

Ask = Callable[[Sequence[int]], Awaitable[Any]]


class ModelService:
    """The Service behind `model_score`."""

    def __init__(self, settings: ModelScore, ask: Ask | None) -> None:
        """Take what asks the scorers of the run, if they are running."""
        self._name = settings.scorer
        self._ask = ask
        self.remembers = settings.cache

    async def start(self) -> None: ...

    def questions(self, one: RewardInput) -> list[Question]:
        return [Question(request={"ids": list(one.token_ids)}, read=lambda reply: (reply, ""))]

    async def admit(self, question: Question) -> None:
        """There is no limit."""

    async def ask(self, question: Question) -> Any:
        if self._ask is None:
            text = f"needs the scorer `{self._name}`, which runs only in a run (asyncrl up)"
            raise Unanswered(text, reason="refused", may_pass=False)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._ask(question.request["ids"])
        except TimeoutError:
            found = f"no scorer `{self._name}` answered within {ANSWER_S:g} s"
            text = f"{found}; logs/{self._name}.*.out of the run directory say why"
            raise Unanswered(text, reason="unavailable") from None
        except EngineError as error:
            raise Unanswered(
                f"the scorer `{self._name}` says: {error}", reason="refused", may_pass=False
            ) from error

    async def close(self) -> None: ...
