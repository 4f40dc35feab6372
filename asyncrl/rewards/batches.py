"""Collects responses of several groups for a function that scores them in one call."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from asyncrl.errors import RewardError
from asyncrl.rewards.base import RewardInput

# Time that a response waits for others.
WAIT_S = 0.05
# Value of a response, NaN if the function abstains, and the answer in it.
Scored = tuple[float, str | None]
Future = asyncio.Future[Scored]


class Divisible(RewardError):
    """A failure that may be that of some responses of a call only."""


class Batches:
    """Responses that wait for a call, and calls that are under way.

    If a function raises, the call is repeated with each half of it, so that only the responses fail for which
    it raises alone. If it hangs, or its process dies, all responses of the call fail.
    """

    def __init__(self, call: Callable[[Sequence[RewardInput]], Awaitable[list[Scored]]]) -> None:
        """`call` scores a batch."""
        self._call = call
        self._waiting: dict[Future, RewardInput] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()

    async def score(self, inputs: Sequence[RewardInput], most: int) -> list[Scored]:
        """Score responses, with others in calls of at most `most`. Raises the first failure."""
        futures: list[Future] = [asyncio.get_running_loop().create_future() for _ in inputs]
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

    async def _score(self, batch: Sequence[tuple[Future, RewardInput]]) -> None:
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
