"""The interface of an inference engine: it samples rollouts, and adopts new weights while requests run."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.sections import SamplingConfig
from asyncrl.errors import EngineError, TransferError
from asyncrl.lineage import Weights
from asyncrl.types import Rollout
from asyncrl.weights.base import UpdateOrder

Device = Literal["cpu", "cuda"]

# Environment variable of an engine's child processes: the process id of the generator that owns them.
OWNER_ENV = "ASYNCRL_ENGINE_OWNER"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """The parameters of one sampling request."""

    temperature: float
    max_response_tokens: int
    stop: tuple[str, ...] = ()
    # Tokens are sampled among the `top_k` most probable that `top_p` and `min_p` leave; -1: among all.
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether a rollout records the tokens that each of its tokens could have been."""
        return self.top_k > 0 and self.temperature > 0

    @classmethod
    def of(cls, config: SamplingConfig, temperature: float) -> Self:
        """Return how a lane of this temperature samples."""
        same = config.model_dump(include={"max_response_tokens", "stop", "top_k", "top_p", "min_p"})
        return cls(temperature=temperature, **same)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptImages:
    """The images of a prompt, as they were read for one group."""

    # The prompt's tokens with one placeholder per image; in the prompt, it has one for each part of an image.
    short_ids: tuple[int, ...]
    # PIL's, in RGB.
    pictures: tuple[Any, ...]
    # Of the bytes of each image.
    digests: NDArray[np.uint64]
    # Returns the tensors that the model's forward pass takes for so many copies of the prompt.
    inputs: Callable[[int], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start of the engine."""

    sampled_tokens: int
    running_requests: int
    # Time in which weight updates kept every request from running.
    paused_s: float


def aborted() -> EngineError:
    """The error of a request that the engine aborted."""
    return EngineError("the request was aborted: the engine was closed, or its weights failed the probe")


def require_target(found: str, needed: str) -> None:
    """Raise TransferError unless an update replaces what this engine lets updates replace."""
    if found != needed:
        text = f"an update of {found!r}, but this engine takes {needed!r}"
        raise TransferError(f"{text}: start learner and generators with the same model.lora")


def require_shapes(theirs: Mapping[str, Sequence[int]], ours: Mapping[str, Sequence[int]]) -> None:
    """Raise TransferError unless an update brings each tensor of ours and no other."""
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            text = f"{name} has shape {theirs.get(name)} in the update"
            raise TransferError(f"{text}, {ours.get(name)} in the engine")


class Bookkeeping:
    """What every engine notes: its weights, its updates and their pauses, and the tokens that it sampled."""

    def __init__(self) -> None:
        self.weights = Weights(0)
        self._updates = 0  # begun: the salt
        self._received: Any = None  # what the update under way has brought
        self._running: dict[Any, int] = {}  # requests, and how many responses each has
        self._sampled_tokens = 0
        self._paused_since_s: float | None = None
        self._paused_s = 0.0

    @property
    def salt(self) -> str:
        return str(self._updates)

    async def begin_update(self) -> None:
        self.weights, self._received = Weights(-1), None
        self._updates += 1
        if self._paused_since_s is None:  # otherwise an update has failed, and its pause goes on
            self._paused_since_s = time.monotonic()

    @contextmanager
    def finishing(self, weights: Weights) -> Iterator[None]:
        """Name the weights and end the pause after the block. Raises EngineError if none were received."""
        if self._paused_since_s is None or self._received is None:
            raise EngineError(f"finish_update({weights}): no weights were received")
        yield
        self.weights = weights
        self._paused_s += time.monotonic() - self._paused_since_s
        self._paused_since_s = None

    def distrust(self) -> None:
        pass

    def stats(self) -> EngineStats:
        pausing_s = 0.0 if self._paused_since_s is None else time.monotonic() - self._paused_since_s
        return EngineStats(
            sampled_tokens=self._sampled_tokens,
            running_requests=sum(self._running.values()),
            paused_s=self._paused_s + pausing_s,
        )


class Engine(Protocol):
    """One inference engine, owned by this process. All methods run on one asyncio loop."""

    @property
    def weights(self) -> Weights:
        """The weights in use; version -1 while they are dirty (unverified, or a mixture of versions)."""

    @property
    def salt(self) -> str:
        """The name of the prefix cache of requests that start now; each weight update begins another one."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        count: int,
        spec: SamplingSpec,
        *,
        salt: str | None = None,
        images: PromptImages | None = None,
    ) -> list[Rollout]:
        """`count` unscored rollouts, with the behaviour log-probability and the exact weights of each token.

        If the spec is truncated, log-probabilities are those among the tokens that were left to sample from,
        which the rollouts record in the columns `kept_counts` and `kept_ids`.

        Requests continue through weight updates; cancelling the task aborts them. With the `salt` of an
        earlier moment the request reads and extends the prefix cache of that moment, so that a conversation
        keeps its cache through updates as one request does. Raises EngineError.
        """

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """[n - 1]: log-probabilities in nats, temperature 1, of token_ids[1:] under the current weights."""

    async def begin_update(self) -> None:
        """Pause sampling, keep the requests, prepare to receive weights. The weights are dirty now."""

    async def receive(self, order: UpdateOrder) -> None:
        """Load the parameters of one order. Raises TransferError: missing parameters, a missed deadline."""

    async def finish_update(self, weights: Weights) -> None:
        """Put the received weights, named `weights`, into use and resume sampling."""

    def distrust(self) -> None:
        """Load in the safest way from now on: the loaded weights have failed the probe."""

    async def abort_requests(self) -> None:
        """Abort every running request; their callers get EngineError."""

    async def progress(self) -> None:
        """Return when the engine samples a token, or, while nothing may run, when its processes answer."""

    def stats(self) -> EngineStats:
        """Counters for telemetry."""

    async def close(self) -> None:
        """Stop the engine's processes; running requests end with EngineError."""
