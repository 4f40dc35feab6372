"""Samples and scores the group of one prompt, both in training and in `asyncrl eval`."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.algo.trainable import GroupLimits, trainable
from asyncrl.columns import TEACHER
from asyncrl.config.environment_section import ENVIRONMENT_PART
from asyncrl.engine.base import Engine, SamplingSpec
from asyncrl.engine.duty import Clock
from asyncrl.errors import ResultError, RewardError, ungrouped
from asyncrl.rewards.base import ABSTAINED, Question, RewardInput, Score, Scorer, judgements_json, unreadable
from asyncrl.types import Group, Prompt, Rollout


class GroupSampler(Protocol):
    """Makes the scored group of a ticket: of single responses, or of episodes (`engine/episodes.py`)."""

    clock: Clock
    # Failures of the environment by reason; each lost one attempt at an episode, which is played again.
    faults: Counter[str]
    # Counters of its rewards, by the name of their metric.
    counts: Counter[str]

    async def group(
        self, prompt: Prompt, ticket_id: int, limits: GroupLimits, spec: SamplingSpec, *, greedy: bool = False
    ) -> Group:
        """The scored group of one ticket; with `greedy` also the reward of a greedy episode.

        Raises RewardError, EngineError, and ResultError for rollouts that cannot be trained on.
        """


class TaskSampler:
    """Leaves each prompt to the sampler of its task; all have one clock and one set of counters."""

    def __init__(self, samplers: Mapping[int, GroupSampler]) -> None:
        """Take the samplers by `Prompt.task`."""
        self._samplers = samplers
        first = next(iter(samplers.values()))
        self.clock, self.faults, self.counts = first.clock, first.faults, first.counts
        for one in samplers.values():
            one.clock, one.faults, one.counts = self.clock, self.faults, self.counts

    async def group(
        self, prompt: Prompt, ticket_id: int, limits: GroupLimits, spec: SamplingSpec, *, greedy: bool = False
    ) -> Group:
        return await self._samplers[prompt.task].group(prompt, ticket_id, limits, spec, greedy=greedy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """One run of the environment, or a single response."""

    rollouts: tuple[Rollout, ...]  # a sequence for each branch of the conversation
    asked: Callable[[], RewardInput]  # what the reward functions are asked about: the last answer
    reward: float | None = None  # the environment's own, of which the rewards of turns are a part
    weight: float = 1.0  # of this reward
    metrics: Mapping[str, float] = field(default_factory=dict)


class Scoring(ABC):
    """Makes groups of the episodes that a subclass samples: checks and scores them."""

    engine: Engine
    scorer: Scorer | None  # without one, the reward is the environment's
    generator_id: str

    @abstractmethod
    async def sampled(
        self, prompt: Prompt, ticket_id: int, limits: GroupLimits, specs: Sequence[SamplingSpec]
    ) -> tuple[Sequence[Episode], Mapping[str, Any]]:
        """Return an unscored episode for each spec, except failed ones, and further columns of `Group`."""

    async def group(
        self, prompt: Prompt, ticket_id: int, limits: GroupLimits, spec: SamplingSpec, *, greedy: bool = False
    ) -> Group:
        started_s = time.monotonic()
        specs = [spec] * limits.rollouts + [replace(spec, temperature=0.0)] * greedy
        episodes, columns = await self.sampled(prompt, ticket_id, limits, specs)
        sampled_s, size = time.monotonic(), len(episodes) - greedy
        unscored = _flattened(episodes)
        versions = (span.version for one in unscored["rollouts"] for span in one.version_spans)
        group = Group(
            ticket_id=ticket_id,
            generator_id=self.generator_id,
            # If the engine is dirty by now, its version is -1, and the newest token's version counts.
            finished_version=max(self.engine.weights.version, *versions),
            sampling_s=sampled_s - started_s,
            **unscored,
            **columns,
        )
        # A greedy rollout has no columns of what was sampled.
        required = () if greedy else limits.required
        if reason := trainable(group, replace(limits, rollouts=len(episodes), required=required)):
            raise ResultError(f"the sampled group is untrainable: {reason}")
        scored, scores = await self._scored(episodes)
        return replace(
            group,
            **_flattened(scored[:size]),
            recorded=with_judgements(group, scores[:size]),
            reward_s=time.monotonic() - sampled_s,
            greedy_reward=scored[size].rollouts[0].reward if greedy else None,
        )

    async def _scored(self, episodes: Sequence[Episode]) -> tuple[list[Episode], list[Score]]:
        scored = list[Episode]()
        scores = [Score(total=0.0, parts={})] * len(episodes)
        if self.scorer is not None:
            scores = await self.scorer.score([episode.asked() for episode in episodes])
        for episode, score in zip(episodes, scores, strict=True):
            total, parts, own = score.total, dict(score.parts), episode.reward
            if own is None and self.scorer is not None and not parts:
                raise RewardError(ABSTAINED)
            if own is not None:
                total, parts[ENVIRONMENT_PART] = total + episode.weight * own, own
            rollouts = []
            for one in episode.rollouts:
                turns = one.turns
                if turns is not None and turns.rewards is not None:
                    turns = replace(turns, rewards=turns.rewards * np.float32(episode.weight))
                given = replace(one, reward=total, reward_parts=parts, answer=score.answer, turns=turns)
                rollouts.append(given)
            scored.append(replace(episode, rollouts=tuple(rollouts)))
        return scored, scores


def _flattened(episodes: Sequence[Episode]) -> dict[str, Any]:
    """The columns of a group that depend on its episodes."""
    names = dict.fromkeys(name for episode in episodes for name in episode.metrics)
    counts = [len(episode.rollouts) for episode in episodes]
    return {
        "rollouts": tuple(rollout for episode in episodes for rollout in episode.rollouts),
        "episode_of": np.repeat(np.arange(len(counts), dtype=np.int32), counts) if max(counts) > 1 else None,
        "episode_metrics": {
            name: np.array([episode.metrics.get(name, np.nan) for episode in episodes], dtype=np.float32)
            for name in names
        },
    }


def with_judgements(group: Group, scores: Sequence[Score]) -> Mapping[str, NDArray[Any]]:
    """Return the recorded columns of the group, and what judges said about its episodes."""
    said = judgements_json(scores)
    return {**group.recorded, "judgements": np.frombuffer(said, np.uint8)} if said else group.recorded


@dataclass(eq=False)
class Sampler(Scoring):
    """Samples and scores whole groups of single responses."""

    engine: Engine
    scorer: Scorer
    decode: Callable[..., str]  # gives the text of a response's ids, with `raw=True` with special tokens
    generator_id: str
    _: KW_ONLY
    counts: Counter[str] = field(default_factory=Counter)
    clock: Clock = field(init=False, default_factory=Clock)
    faults: Counter[str] = field(init=False, default_factory=Counter)  # stays empty

    async def sampled(
        self, prompt: Prompt, ticket_id: int, limits: GroupLimits, specs: Sequence[SamplingSpec]
    ) -> tuple[Sequence[Episode], Mapping[str, Any]]:
        images = await asyncio.to_thread(prompt.images) if prompt.images else None
        requests = [(limits.rollouts, specs[0]), *((1, one) for one in specs[limits.rollouts :])]
        # They run concurrently; the first failure cancels the others.
        tasks = [
            asyncio.create_task(self.engine.sample(prompt.token_ids, count, spec, images=images))
            for count, spec in requests
        ]
        try:
            with self.clock.group(len(specs)):
                answers = await asyncio.gather(*tasks)
        except ValueError as error:  # the columns of a rollout differ in length
            raise ResultError(str(error)) from error
        finally:
            for task in tasks:
                task.cancel()
        for (count, _), rollouts in zip(requests, answers, strict=True):
            if len(rollouts) != count:
                raise ResultError(f"the engine gave {len(rollouts)} responses where {count} were asked for")
        episodes = [
            Episode(rollouts=(one,), asked=partial(self._asked, prompt, one))
            for rollouts in answers
            for one in rollouts
        ]
        return episodes, {"recorded": {"image_digests": images.digests}} if images else {}

    def _asked(self, prompt: Prompt, rollout: Rollout) -> RewardInput:
        ids = rollout.response_ids.tolist()
        return RewardInput(
            prompt=prompt.text,
            response=self.decode(ids),
            raw_response=partial(self.decode, ids, raw=True),
            row=prompt.row,
            chat=prompt.chat,
            truncated=rollout.truncated,
            response_tokens=len(ids),
            token_ids=[*prompt.token_ids, *ids],
        )


Ask = Callable[[Question], Awaitable[tuple[Any, str]]]


class TaughtSampler:
    """A GroupSampler whose groups have the column `teacher_logprobs`, where the limits require it."""

    def __init__(self, sampler: GroupSampler, ask: Ask, counts: Counter[str]) -> None:
        """Take what asks the teacher, and its counters."""
        self._sampler, self._ask = sampler, ask
        self.clock, self.faults, self.counts = sampler.clock, sampler.faults, counts

    async def group(
        self, prompt: Prompt, ticket_id: int, limits: GroupLimits, spec: SamplingSpec, *, greedy: bool = False
    ) -> Group:
        plain = replace(limits, required=())
        group = await self._sampler.group(prompt, ticket_id, plain, spec, greedy=greedy)
        if TEACHER not in limits.required:
            return group
        started_s = time.monotonic()
        with ungrouped():
            async with asyncio.TaskGroup() as tasks:
                taught = [tasks.create_task(self._taught(prompt, one)) for one in group.rollouts]
        rollouts = tuple(task.result() for task in taught)
        return replace(group, rollouts=rollouts, reward_s=group.reward_s + time.monotonic() - started_s)

    async def _taught(self, prompt: Prompt, rollout: Rollout) -> Rollout:
        before = prompt.teacher_ids or rollout.prompt_ids.tolist()
        ids: Sequence[int] = [*before, *rollout.response_ids.tolist()]

        def read(reply: object) -> tuple[NDArray[np.float32], str]:
            if not isinstance(reply, bytes) or len(reply) != 4 * (len(ids) - 1):
                raise unreadable(f"no log-probabilities of {len(ids) - 1} tokens")
            logprobs = np.frombuffer(reply, np.float32)[-len(rollout.response_ids) :]
            if not np.isfinite(logprobs).all():
                raise unreadable("log-probabilities that are not finite")
            return logprobs, ""

        logprobs, _ = await self._ask(Question(request={"ids": ids}, read=read))
        return replace(rollout, recorded={**rollout.recorded, TEACHER: logprobs})
