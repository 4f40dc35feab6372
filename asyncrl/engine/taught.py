"""Adds the log-probabilities of a teacher in scorer processes to each sampled group."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.algo.trainable import GroupLimits
from asyncrl.columns import TEACHER
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.sampler import GroupSampler
from asyncrl.errors import ungrouped
from asyncrl.rewards.base import Question, unreadable
from asyncrl.types import Group, Prompt, Rollout

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
