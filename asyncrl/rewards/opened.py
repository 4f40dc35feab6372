"""The Scorer of a config: reward processes for its functions, and services for its other rewards.

A question to a service that may be answered later is asked again, with growing random pauses, until
`reward.timeout_s` is over. Waiting until the service may be asked takes none of it, neither for a limit per
minute nor for a scorer that starts. An unreadable answer is asked for at most `reward.attempts` times.
"""

import asyncio
import hashlib
import json
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.backoff import Backoff
from asyncrl.config import reward_section
from asyncrl.config.reward_section import HttpReward, LlmJudge, ModelJudge, OfScorer, Remote, RewardConfig
from asyncrl.errors import RewardError, ungrouped
from asyncrl.rewards.base import Judgement, Question, RewardInput, Score, Service, Unanswered, scored
from asyncrl.rewards.endpoints import HttpService, JudgeService
from asyncrl.rewards.reward_process import Divisible, Scored, Worker, reward_sandbox

# Questions to each service at the same time.
AT_ONCE = 256
# Answers of each service that are remembered.
REMEMBERED = 1 << 14
# Time that a response waits for others, for a function that scores them in one call.
WAIT_S = 0.05
AGAIN = Backoff(first_s=0.25, longest_s=8.0)

OpenScorer = Callable[[OfScorer], Service]
_T = TypeVar("_T")
_Future = asyncio.Future[Scored]


class Asker:
    """Asks one service, in the generator's own loop: repeats, counts and remembers."""

    def __init__(self, where: str, service: Service, config: RewardConfig, counts: Counter[str]) -> None:
        """Take `where`, which begins every error, and counters by the name of their metric."""
        self.service = service
        self.counts = counts
        self._where, self._config = where, config
        self._free = asyncio.Semaphore(AT_ONCE)
        # Questions that were answered or are being asked, the least recently used first.
        self._asked: OrderedDict[bytes | object, asyncio.Task[tuple[Any, str]]] = OrderedDict()
        for name in ("reward_calls", "reward_cache_hits", "reward_retries"):
            counts.setdefault(name, 0)

    async def start(self) -> None:
        """Raise RewardError for a service that cannot be used."""
        try:
            await self.service.start()
        except RewardError as error:
            raise RewardError(f"{self._where} {error}") from error

    def questions(self, one: RewardInput) -> list[Question]:
        """The questions about a response. Raises RewardError for a bad row."""
        try:
            return self.service.questions(one)
        except RewardError as error:
            raise RewardError(f"{self._where} {error}") from error

    async def answer(self, question: Question) -> tuple[Any, str]:
        """The answer to a question, which is sent only once, also while it is being asked."""
        key: bytes | object = object()
        if self.service.remembers:
            text = json.dumps([question.request, question.vote], sort_keys=True, default=str)
            key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

        def keep(task: asyncio.Task[tuple[Any, str]]) -> None:
            """Forget failures, and the oldest answers."""
            if task.cancelled() or task.exception() or not isinstance(key, bytes):
                self._asked.pop(key, None)
            oldest = next(iter(self._asked), None)
            if len(self._asked) > REMEMBERED and self._asked[oldest].done():
                del self._asked[oldest]

        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._ask(question))
            task.add_done_callback(keep)
        else:
            self.counts["reward_cache_hits"] += 1
            self._asked.move_to_end(key)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Drop what is being asked."""
        asking = list(self._asked.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self.service.close()

    async def _ask(self, question: Question) -> tuple[Any, str]:
        try:
            async with self._free:
                return await self._insist(question)
        except Unanswered as failure:
            self.counts[f"reward_failures_{failure.reason}"] += 1
            raise RewardError(f"{self._where} {failure}") from failure

    async def _insist(self, question: Question) -> tuple[Any, str]:
        """Ask until there is an answer, an error that will not pass, or no time of the call left."""
        loop, failures = asyncio.get_running_loop(), list[Unanswered]()
        left_s = limit_s = self._config.timeout_s
        while True:
            await self.service.admit(question)
            began_s = loop.time()
            self.counts["reward_calls"] += 1
            try:
                async with asyncio.timeout(left_s):
                    return question.read(await self.service.ask(question))
            except TimeoutError:
                last = f"; the last answer: {failures[-1]}" if failures else ""
                reason = failures[-1].reason if failures else "late"
                raise Unanswered(f"took longer than {limit_s:g} s{last}", reason=reason) from None
            except Unanswered as failure:
                failures.append(failure)
                reasons = Counter(one.reason for one in failures)
                pause_s = failure.pause_s or AGAIN.pause_s(len(failures)) * random.uniform(0.5, 1.0)
                left_s -= pause_s
                # The call of a first outage takes no time: a scorer that died had it, and another gets it.
                if failure.reason != "unavailable" or reasons["unavailable"] > 1:
                    left_s -= loop.time() - began_s
                if not failure.may_pass or left_s < 0.0 or reasons["unreadable"] >= self._config.attempts:
                    raise
            self.counts["reward_retries"] += 1
            await asyncio.sleep(pause_s)


class _Batches:
    """Responses that wait for a call, and calls that are under way.

    If a function raises, the call is repeated with each half of it, so that only the responses fail for which
    it raises alone. If it hangs, or its process dies, all responses of the call fail.
    """

    def __init__(self, call: Callable[[Sequence[RewardInput]], Awaitable[list[Scored]]]) -> None:
        """`call` scores a batch."""
        self._call = call
        self._waiting: dict[_Future, RewardInput] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()

    async def score(self, inputs: Sequence[RewardInput], most: int) -> list[Scored]:
        """Score responses, with others in calls of at most `most`. Raises the first failure."""
        futures: list[_Future] = [asyncio.get_running_loop().create_future() for _ in inputs]
        self._waiting.update(zip(futures, inputs, strict=True))
        may_wait = True
        try:
            while futures[-1] in self._waiting:
                if len(self._waiting) < most and may_wait:
                    await asyncio.sleep(WAIT_S)
                    may_wait = False
                    continue
                batch = [(one, self._waiting.pop(one)) for one in [*self._waiting][:most]]
                # Its own task, because other groups need it too.
                task = asyncio.create_task(self._score(batch))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            return await asyncio.gather(*futures)
        finally:
            for future in futures:
                self._waiting.pop(future, None)

    def close(self) -> None:
        """Give up the calls that are under way."""
        for task in self._tasks:
            task.cancel()

    async def _score(self, batch: Sequence[tuple[_Future, RewardInput]]) -> None:
        try:
            scores = await self._call([one for _, one in batch])
        except Exception as error:  # noqa: BLE001 - raised where the scores are waited for
            if len(batch) > 1 and isinstance(error, Divisible):
                half = len(batch) // 2
                await self._score(batch[:half])
                await self._score(batch[half:])
            for future, _ in batch:
                if not future.done():
                    future.set_exception(error)
        else:
            for (future, _), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)
        finally:
            for future, _ in batch:
                future.cancel()  # without effect, unless this task was cancelled


class Rewards:
    """The Scorer of a generator: asks processes and services at the same time, and adds up their parts."""

    def __init__(
        self,
        config: RewardConfig,
        run_root: Path,
        loaded: Callable[[], None] = lambda: None,
        open_scorer: OpenScorer | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        """Take what makes the Service of a scorer of the run. `counts` may be shared.

        `loaded` is called when a process has loaded the functions, and raises if it must not be used. A
        sandbox hides `run_root`, which holds keys, sockets and checkpoints. Raises RewardError for a service
        whose key or template is missing.
        """
        self._functions = config.functions
        # Counters of the questions to services since the start, by the name of their metric.
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._askers = {
            one.part: Asker(
                f"reward part `{one.part}`", _service(one.remote, open_scorer), config, self.counts
            )
            for one in config.functions
            if one.remote is not None
        }
        local = tuple(one for one in config.functions if one.remote is None)
        names = [one.function for one in local]
        is_boxed = bool(local) and config.sandbox == "bubblewrap"
        self._sandbox = reward_sandbox(names, run_root) if is_boxed else None
        # `Form.most` of each function's part; empty before the functions are loaded.
        self._most: dict[str, int] = {}
        own = config.model_copy(update={"functions": local})
        count = config.workers if local else 0
        self._workers = [Worker(own, self._sandbox, loaded, self._most) for _ in range(count)]
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._batches = {one.part: _Batches(partial(self._call, one.part)) for one in local}

    @property
    def printed(self) -> str:
        """The end of what user code printed in the processes that are running."""
        return "\n".join(text for worker in self._workers if (text := worker.printed.text))

    @property
    def most(self) -> int:
        """`Form.most` of the only function, the largest of several; 1 for services."""
        return max(self._most.values(), default=1)

    async def start(self) -> None:
        """Start all processes, so that a function that cannot be used fails the run, not a ticket.

        Raises RewardError.
        """
        if self._sandbox and (problem := self._sandbox.problem()):
            raise RewardError(problem)
        await asyncio.gather(*(worker.load() for worker in self._workers))
        for asker in self._askers.values():
            await asker.start()

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """One score per input. The first failure raises RewardError; nothing waits for other answers."""
        with ungrouped():
            if self._workers and not self._most:
                await self._with_worker(Worker.load)
            async with asyncio.TaskGroup() as tasks:
                calling = {
                    part: [
                        tasks.create_task(
                            self._batches[part].score(some, most) if most > 1 else self._call(part, some)
                        )
                        for some in ([[one] for one in inputs] if most == 1 else [inputs])
                    ]
                    for part, most in self._most.items()
                }
                asking = [tasks.create_task(self._ask(one)) for one in inputs]
        found = {part: [one for call in calls for one in call.result()] for part, calls in calling.items()}
        scores = []
        for at, task in enumerate(asking):
            given = {part: of_inputs[at] for part, of_inputs in found.items()}
            parts = {part: value for part, (value, _) in given.items() if not math.isnan(value)}
            answer = next((answer for _, answer in given.values() if answer is not None), None)
            judged, judgements = task.result()
            scores.append(scored(self._functions, parts | judged, answer, tuple(judgements)))
        return scores

    async def close(self) -> None:
        """Kill the processes, and drop what is being asked."""
        for batches in self._batches.values():
            batches.close()
        for worker in self._workers:
            worker.kill()  # before anything is awaited, which may be cancelled
        await asyncio.gather(*(worker.end() for worker in self._workers))
        for asker in self._askers.values():
            await asker.close()

    async def _call(self, part: str, inputs: Sequence[RewardInput]) -> list[Scored]:
        return await self._with_worker(lambda worker: worker.call(part, inputs))

    async def _with_worker(self, work: Callable[[Worker], Awaitable[_T]]) -> _T:
        """Wait for an idle worker, and use it."""
        worker = await self._idle.get()
        try:
            await asyncio.sleep(0)  # if the call that had it failed, this one is cancelled before it begins
            return await work(worker)
        finally:
            self._idle.put_nowait(worker)

    async def _ask(self, one: RewardInput) -> tuple[dict[str, float], list[Judgement]]:
        """The parts of services, and what judges were asked and said."""
        questions = [
            (part, question) for part, asker in self._askers.items() for question in asker.questions(one)
        ]
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(self._askers[part].answer(question)) for part, question in questions]
        values: dict[str, list[float]] = {}
        judgements = []
        for (part, question), task in zip(questions, asking, strict=True):
            value, words = task.result()
            if value is not None:
                values.setdefault(part, []).append(value)
            if question.prompt and value is not None:
                judgements.append(Judgement(part, _cut(question.prompt), _cut(words), value))
        return {part: sum(numbers) / len(numbers) for part, numbers in values.items()}, judgements


def _service(settings: Remote, open_scorer: OpenScorer | None) -> Service:
    if isinstance(settings, LlmJudge):
        service = HttpService(settings, place="/chat/completions")
        return JudgeService(settings, service, {"model": settings.model, **settings.request})
    if isinstance(settings, HttpReward):
        return HttpService(settings)
    assert isinstance(settings, OfScorer)
    if open_scorer is None:
        raise RewardError(f"the scorer `{settings.scorer}` is needed, and no scorers run here")
    model = open_scorer(settings)
    if not isinstance(settings, ModelJudge):
        return model
    return JudgeService(settings, model, settings.model_dump(include={"temperature", "max_tokens"}))


def _cut(text: str) -> str:
    return text.encode("utf-8", "replace")[: reward_section.TEXT_BYTES].decode("utf-8", "ignore")
