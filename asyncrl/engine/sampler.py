"""Samples and scores the group of one prompt, both in training and in `asyncrl eval`."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.algo.trainable import GroupLimits, trainable
from asyncrl.columns import TEACHER
from asyncrl.engine.base import Engine, PromptImages, SamplingSpec
from asyncrl.engine.clock import Clock
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


def finished_version(engine: Engine, rollouts: Iterable[Rollout]) -> int:
    """The generator's version when the last token was sampled.

    If the engine is dirty by now, its version is -1, and the newest token's version counts.
    """
    return max(engine.weights.version, *(span.version for one in rollouts for span in one.version_spans))


def with_judgements(group: Group, scores: Sequence[Score]) -> Mapping[str, NDArray[Any]]:
    """Return the recorded columns of the group, and what judges said about its episodes."""
    said = judgements_json(scores)
    return {**group.recorded, "judgements": np.frombuffer(said, np.uint8)} if said else group.recorded


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


@dataclass(eq=False)
class Sampler:
    """Samples and scores whole groups of single responses."""

    engine: Engine
    scorer: Scorer
    decode: Callable[..., str]  # gives the text of a response's ids, with `raw=True` with special tokens
    generator_id: str
    _: KW_ONLY
    counts: Counter[str] = field(default_factory=Counter)
    clock: Clock = field(init=False, default_factory=Clock)
    faults: Counter[str] = field(init=False, default_factory=Counter)  # stays empty

    async def group(
        self, prompt: Prompt, ticket_id: int, limits: GroupLimits, spec: SamplingSpec, *, greedy: bool = False
    ) -> Group:
        started_s, size = time.monotonic(), limits.rollouts
        images = await asyncio.to_thread(prompt.images) if prompt.images else None
        with self.clock.group(size + greedy):
            rollouts = await self._sample(
                prompt.token_ids, [(size, spec), *([(1, replace(spec, temperature=0.0))] * greedy)], images
            )
        sampled_s = time.monotonic()
        group = Group(
            ticket_id=ticket_id,
            rollouts=tuple(rollouts),
            generator_id=self.generator_id,
            finished_version=finished_version(self.engine, rollouts),
            sampling_s=sampled_s - started_s,
            recorded={"image_digests": images.digests} if images else {},
        )
        # A greedy rollout has no columns of what was sampled.
        required = () if greedy else limits.required
        if reason := trainable(group, replace(limits, rollouts=size + greedy, required=required)):
            raise ResultError(f"the engine's rollouts are untrainable: {reason}")
        scored, scores = await self._score(prompt, rollouts)
        return replace(
            group,
            rollouts=scored[:size],
            recorded=with_judgements(group, scores[:size]),
            reward_s=time.monotonic() - sampled_s,
            greedy_reward=scored[size].reward if greedy else None,
        )

    async def _sample(
        self,
        prompt_ids: Sequence[int],
        requests: Sequence[tuple[int, SamplingSpec]],
        images: PromptImages | None,
    ) -> list[Rollout]:
        """The rollouts of all requests, which run concurrently; the first failure cancels the others."""
        tasks = [
            asyncio.create_task(self.engine.sample(prompt_ids, count, spec, images=images))
            for count, spec in requests
        ]
        try:
            answers = await asyncio.gather(*tasks)
        except ValueError as error:  # the columns of a rollout differ in length
            raise ResultError(str(error)) from error
        finally:
            for task in tasks:
                task.cancel()
        for (count, _), rollouts in zip(requests, answers, strict=True):
            if len(rollouts) != count:
                raise ResultError(f"the engine gave {len(rollouts)} responses where {count} were asked for")
        return [rollout for rollouts in answers for rollout in rollouts]

    async def _score(
        self, prompt: Prompt, rollouts: Sequence[Rollout]
    ) -> tuple[tuple[Rollout, ...], list[Score]]:
        all_ids = [rollout.response_ids.tolist() for rollout in rollouts]
        inputs = [
            RewardInput(
                prompt=prompt.text,
                response=self.decode(ids),
                raw_response=partial(self.decode, ids, raw=True),
                row=prompt.row,
                chat=prompt.chat,
                truncated=rollout.truncated,
                response_tokens=len(ids),
                token_ids=[*prompt.token_ids, *ids],
            )
            for rollout, ids in zip(rollouts, all_ids, strict=True)
        ]
        scores = await self.scorer.score(inputs)
        if not all(score.parts for score in scores):
            raise RewardError(ABSTAINED)
        rewarded = tuple(
            replace(rollout, reward=score.total, reward_parts=score.parts, answer=score.answer)
            for rollout, score in zip(rollouts, scores, strict=True)
        )
        return rewarded, scores


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
