"""A small real engine without vLLM: a toy policy whose every probability is known, for tests of the loops.

The policy is one vector of logits over a small vocabulary, the same at every position, or a table with one
such row for each last token. An order brings logits (`details={"tensors": {"logits": [...]}}`), or the engine
computes them from the version. In a vector policy, token 0 ends a response.
"""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import Bookkeeping, SamplingSpec, aborted
from asyncrl.errors import EngineError, TransferError
from asyncrl.lineage import Weights
from asyncrl.types import Rollout, version_spans
from asyncrl.weights.base import UpdateOrder

EOS = 0


def logits_of(version: int, vocabulary: int = 16) -> NDArray[np.float32]:
    """[vocabulary]: the logits of a version, in nats."""
    return np.random.default_rng(version).normal(size=vocabulary).astype(np.float32)


def logprobs_of(logits: NDArray[np.float32], temperature: float = 1.0) -> NDArray[np.float32]:
    """[vocabulary]: the log-softmax of logits / temperature."""
    scaled = logits.astype(np.float64) / temperature
    logprobs: NDArray[np.float32] = (scaled - np.logaddexp.reduce(scaled)).astype(np.float32)
    return logprobs


class FakeEngine(Bookkeeping):
    """The `Engine` interface in one process; deterministic for a seed and an order of calls."""

    def __init__(
        self,
        *,
        vocabulary: int = 16,
        token_s: float = 0.0,
        seed: int = 0,
        logits: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """`token_s` is the time per token; requests run concurrently. `logits` is the table of version 0."""
        super().__init__()
        self._vocabulary = vocabulary
        self._token_s = token_s
        self._random = np.random.default_rng(seed)
        self._logits = logits_of(0, vocabulary) if logits is None else np.array(logits, dtype=np.float32)
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._dead = False

    async def sample(
        self, prompt_ids: Sequence[int], count: int, spec: SamplingSpec, **_: object
    ) -> list[Rollout]:
        async def respond() -> list[Rollout]:
            return await asyncio.gather(*(self._respond(prompt_ids, spec) for _ in range(count)))

        self._require_alive()  # `salt` and `images` have no effect: nothing is cached or seen
        task = asyncio.create_task(respond())
        self._running[task] = count
        task.add_done_callback(self._running.pop)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            self._require_alive()
            raise aborted()
        return task.result()

    async def _respond(self, prompt_ids: Sequence[int], spec: SamplingSpec) -> Rollout:
        tokens: list[int] = []
        logprobs: list[float] = []
        sampled_by: list[Weights] = []
        is_table = self._logits.ndim == 2
        while len(tokens) < spec.max_response_tokens and (is_table or EOS not in tokens[-1:]):
            await asyncio.sleep(self._token_s)
            await self._resumed.wait()
            token, logprob = self._draw((tokens or prompt_ids)[-1], spec.temperature)
            tokens.append(token)
            logprobs.append(logprob)
            sampled_by.append(self.weights)
            self._sampled_tokens += 1
        return Rollout(
            prompt_ids=np.array(prompt_ids, dtype=np.int32),
            response_ids=np.array(tokens, dtype=np.int32),
            action_mask=np.ones(len(tokens), dtype=np.bool_),
            behaviour_logprobs=np.array(logprobs, dtype=np.float32),
            version_spans=version_spans(sampled_by),
            finish_reason="stop" if is_table or tokens[-1:] == [EOS] else "length",
        )

    def _draw(self, last: int, temperature: float) -> tuple[int, float]:
        logits = self._row(last)
        logprobs_V = logprobs_of(logits, temperature or 1.0)
        drawn = logits if temperature == 0 else logprobs_V + self._random.gumbel(size=self._vocabulary)
        token = int(drawn.argmax())
        return token, float(logprobs_V[token])

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        self._require_alive()
        if not self._resumed.is_set():
            raise EngineError("score: the engine is paused for a weight update; finish the update first")
        return np.array(
            [logprobs_of(self._row(last))[token] for last, token in pairwise(token_ids)], dtype=np.float32
        )

    def _row(self, last: int) -> NDArray[np.float32]:
        """[vocabulary]: the logits after the token `last`."""
        return self._logits[last] if self._logits.ndim == 2 else self._logits

    async def begin_update(self) -> None:
        self._require_alive()
        await super().begin_update()
        self._resumed.clear()

    async def receive(self, order: UpdateOrder) -> None:
        self._require_alive()
        if self._resumed.is_set():
            raise EngineError("receive: requests are running; begin the update first")
        if "tensors" in order.details:
            logits = np.array(order.details["tensors"]["logits"], dtype=np.float32)
        else:
            logits = logits_of(order.version, self._vocabulary)
        if (found := logits.shape) != (needed := self._logits.shape):
            raise TransferError(
                f"weights of version {order.version}: logits have shape {found}, not {needed}"
            )
        self._received = logits

    async def finish_update(self, weights: Weights) -> None:
        self._require_alive()
        with self.finishing(weights):
            self._logits = self._received
        self._resumed.set()

    async def abort_requests(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def kill(self) -> None:
        """Behave like an engine whose process has died: every call fails from now on."""
        self._dead = True
        for task in self._running:
            task.cancel()

    async def progress(self) -> None:
        self._require_alive()

    async def close(self) -> None:
        await self.abort_requests()

    def _require_alive(self) -> None:
        if self._dead:
            raise EngineError("the engine has died")
