"""Opens the Scorer of a config: reward processes for its functions, and services for its other rewards."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncrl.config.reward_section import HttpReward, LlmJudge, ModelScore, Remote, RewardConfig
from asyncrl.errors import ungrouped
from asyncrl.rewards.base import RewardInput, Score, Service, scored
from asyncrl.rewards.endpoints import HttpService, JudgeService
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.remote import RemoteScorer
from asyncrl.rewards.scorers import Ask, ModelService


class Rewards:
    """The Scorer of a generator: asks processes and services at the same time, and adds up their parts."""

    def __init__(
        self,
        config: RewardConfig,
        run_root: Path,
        loaded: Callable[[], None] = lambda: None,
        scorers: Mapping[str, Ask] | None = None,
    ) -> None:
        """Take what asks the scorers of the run, by name. `loaded` is as in RewardPool.

        Raises RewardError for a service whose key or template is missing.
        """
        self._functions = config.functions
        local = tuple(one for one in config.functions if one.remote is None)
        services = {
            one.part: _service(settings, scorers or {})
            for one in config.functions
            if (settings := one.remote) is not None
        }
        own = config.model_copy(update={"functions": local})
        self._pool = RewardPool(own, run_root, loaded) if local else None
        self._remote = RemoteScorer(config, services) if services else None
        self._scorers = [one for one in (self._pool, self._remote) if one is not None]

    @property
    def counts(self) -> Counter[str]:
        """Counters of the questions to services since the start, by the name of their metric."""
        return self._remote.counts if self._remote else Counter()

    @property
    def printed(self) -> str:
        """The end of what user code printed in the processes."""
        return self._pool.printed if self._pool else ""

    async def start(self) -> None:
        """Start the processes. Raises RewardError for functions that cannot be used."""
        for one in self._scorers:
            await one.start()

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """One score per input. The first failure cancels the others and raises RewardError."""
        with ungrouped():
            async with asyncio.TaskGroup() as tasks:
                scoring = [tasks.create_task(one.score(inputs)) for one in self._scorers]
        return [
            scored(
                self._functions,
                {part: value for score in scores for part, value in score.parts.items()},
                next((score.answer for score in scores if score.answer is not None), None),
                tuple(judgement for score in scores for judgement in score.judgements),
            )
            for scores in zip(*(task.result() for task in scoring), strict=True)
        ]

    async def close(self) -> None:
        """Kill the processes, and drop what is being asked."""
        for one in self._scorers:
            await one.close()


def _service(settings: Remote, scorers: Mapping[str, Ask]) -> Service:
    if isinstance(settings, LlmJudge):
        return JudgeService(settings)
    if isinstance(settings, ModelScore):
        return ModelService(settings, scorers.get(settings.scorer))
    assert isinstance(settings, HttpReward)
    return HttpService(settings)
