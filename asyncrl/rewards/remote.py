"""Asks the services that compute rewards, for hundreds of responses at a time, in the generator's own loop.

A question that may be answered later is asked again, with growing and random pauses, until `reward.timeout_s`
is over. This time starts when the service may be asked: waiting for a limit per minute does not count. An
answer that cannot be read is asked for at most `reward.attempts` times.
"""

import asyncio
import hashlib
import json
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

from asyncrl.backoff import Backoff
from asyncrl.config.reward_section import TEXT_BYTES, RewardConfig
from asyncrl.errors import RewardError, ungrouped
from asyncrl.rewards.base import Judgement, Question, RewardInput, Score, Service, Unanswered, scored
from asyncrl.rewards.functions import checked_reward

# Questions to each service at the same time.
AT_ONCE = 256
# Answers that are remembered.
REMEMBERED = 1 << 14
AGAIN = Backoff(first_s=0.25, longest_s=8.0)

Answer = tuple[float | None, str]


class RemoteScorer:
    """The Scorer of rewards that services compute; shared by all groups in flight."""

    def __init__(self, config: RewardConfig, services: Mapping[str, Service]) -> None:
        """Take `services` by the names of the parts."""
        self._config = config
        self._services = services
        self._free = {part: asyncio.Semaphore(AT_ONCE) for part in services}
        # Questions that were answered or are being asked, the least recently used first.
        self._asked: OrderedDict[bytes | object, asyncio.Task[Answer]] = OrderedDict()
        self.counts: Counter[str] = Counter(reward_calls=0, reward_cache_hits=0, reward_retries=0)

    async def start(self) -> None:
        for part, service in self._services.items():
            try:
                await service.start()
            except RewardError as error:
                raise RewardError(f"reward part `{part}` {error}") from error

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """One score per input. The first failure raises RewardError; nothing waits for the other answers."""
        with ungrouped():
            async with asyncio.TaskGroup() as tasks:
                scoring = [tasks.create_task(self._score_one(one)) for one in inputs]
        return [task.result() for task in scoring]

    async def close(self) -> None:
        """Drop what is being asked."""
        asking = list(self._asked.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for service in self._services.values():
            await service.close()

    async def _score_one(self, one: RewardInput) -> Score:
        questions = [
            (part, question)
            for part, service in self._services.items()
            for question in self._questions(part, service, one)
        ]
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(self._answer(*question)) for question in questions]
        values: dict[str, list[float]] = {}
        judgements = []
        for (part, question), task in zip(questions, asking, strict=True):
            value, words = task.result()
            if value is not None:
                values.setdefault(part, []).append(value)
            if question.prompt and value is not None:
                judgements.append(Judgement(part, _cut(question.prompt), _cut(words), value))
        parts = {part: sum(numbers) / len(numbers) for part, numbers in values.items()}
        return scored(self._config.functions, parts, judgements=tuple(judgements))

    def _questions(self, part: str, service: Service, one: RewardInput) -> list[Question]:
        try:
            return service.questions(one)
        except RewardError as error:
            raise RewardError(f"reward part `{part}` {error}") from error

    async def _answer(self, part: str, question: Question) -> Answer:
        """The answer to a question, which is sent only once, also while it is being asked."""
        key = _key(part, question) if self._services[part].remembers else object()
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._ask(part, question))
            task.add_done_callback(partial(self._keep, key))
        else:
            self.counts["reward_cache_hits"] += 1
            self._asked.move_to_end(key)
        return await asyncio.shield(task)

    def _keep(self, key: bytes | object, task: asyncio.Task[Answer]) -> None:
        """Forget failures, and the oldest answers."""
        if task.cancelled() or task.exception() or not isinstance(key, bytes):
            self._asked.pop(key, None)
        oldest = next(iter(self._asked), None)
        if len(self._asked) > REMEMBERED and self._asked[oldest].done():
            del self._asked[oldest]

    async def _ask(self, part: str, question: Question) -> Answer:
        service, limit_s = self._services[part], self._config.timeout_s
        failures: list[Unanswered] = []
        try:
            async with self._free[part]:
                await service.admit(question)
                try:
                    async with asyncio.timeout(limit_s):
                        return await self._insist(service, question, failures)
                except TimeoutError:
                    last = f"; the last answer: {failures[-1]}" if failures else ""
                    reason = failures[-1].reason if failures else "late"
                    raise Unanswered(f"took longer than {limit_s:g} s{last}", reason=reason) from None
        except Unanswered as failure:
            self.counts[f"reward_failures_{failure.reason}"] += 1
            raise RewardError(f"reward part `{part}` {failure}") from failure

    async def _insist(self, service: Service, question: Question, failures: list[Unanswered]) -> Answer:
        """Ask until there is an answer, or an error that will not pass."""
        until_s = asyncio.get_running_loop().time() + self._config.timeout_s
        while True:
            self.counts["reward_calls"] += 1
            try:
                value, words = question.read(await service.ask(question))
                return None if value is None else _finite(value), words
            except Unanswered as failure:
                failures.append(failure)
                unreadable = sum(one.reason == "unreadable" for one in failures)
                pause_s = failure.pause_s or AGAIN.pause_s(len(failures)) * random.uniform(0.5, 1.0)
                is_too_late = asyncio.get_running_loop().time() + pause_s > until_s
                if not failure.may_pass or unreadable >= self._config.attempts or is_too_late:
                    raise
            self.counts["reward_retries"] += 1
            await asyncio.sleep(pause_s)
            await service.admit(question)


def _cut(text: str) -> str:
    return text.encode("utf-8", "replace")[:TEXT_BYTES].decode("utf-8", "ignore")


def _key(part: str, question: Question) -> bytes:
    text = json.dumps([part, question.request, question.vote], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _finite(value: float) -> float:
    try:
        return checked_reward(value)
    except RewardError as error:
        raise Unanswered(str(error), reason="unreadable") from error
