"""What a generator needs from an inference engine: sample rollouts, and adopt new weights under running requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.lineage import Weights
from asyncrl.types import Rollout
from asyncrl.weights.base import UpdateOrder

# Environment variable of an engine's child processes: the process id that they must not outlive.
OWNER_ENV = "ASYNCRL_ENGINE_OWNER"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How to sample one request."""

    temperature: float
    max_response_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start; the caller takes differences."""

    sampled_tokens: int
    running_requests: int
    # Time in which no request could run because weights changed.
    paused_s: float


class Engine(Protocol):
    """One inference engine in this process's care. All methods run on one asyncio loop."""

    @property
    def weights(self) -> Weights:
        """Those in use; version -1 while they are dirty."""
        ...

    async def sample(self, prompt_ids: Sequence[int], count: int, spec: SamplingSpec) -> list[Rollout]:
        """`count` unscored rollouts; each token carries its behaviour log-probability and exact weights.

        Survives weight updates; cancelling the task aborts the requests. Raises EngineError when the engine is dead.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probabilities (temperature 1) of token_ids[1:] under the current weights, for the probe."""
        ...

    async def begin_update(self) -> None:
        """Pause sampling, keep the requests, and make the engine ready to receive. The weights are dirty from here."""
        ...

    async def receive(self, order: UpdateOrder) -> None:
        """Receive the parameters of one order; returns when they are loaded.

        Raises TransferError on a checksum, a count or a deadline.
        """
        ...

    async def finish_update(self, weights: Weights) -> None:
        """Make what was received current as `weights` and resume sampling."""
        ...

    async def abort_requests(self) -> None:
        """Drop every running request: their callers get EngineError. Used when weights turn out to be wrong."""
        ...

    async def progress(self) -> None:
        """Return when the engine gets on: when a token is sampled, or, where nothing may run, when its processes answer."""
        ...

    def stats(self) -> EngineStats:
        """Counters for telemetry."""
        ...

    async def close(self) -> None:
        """Stop the engine's processes."""
        ...
