"""The network: stands for redis-py's client; its connection loses, delays and repeats requests."""

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from redis.exceptions import BusyLoadingError, ConnectionError, ResponseError, TimeoutError

from asyncrl.buffer.connection import SOCKET_TIMEOUT_S, StoreConnection

from .engine import Engine, Killed, Process
from .faults import RARE, Faults
from .store import Request, VirtualStore, function_name, lane_of

LATEST_S = 120.0
"""A delayed request or a late duplicate arrives before that."""
RECENT = 8
"""Different requests of learners that may come back when the store loses something."""
OF_A_LEARNER = {"take", "reject", "commit", "recover"}


class Network:
    """Between all processes and the store."""

    def __init__(self, engine: Engine, store: VirtualStore, faults: Faults) -> None:
        self._engine, self._store, self._faults = engine, store, faults
        self.down_until_s = 0.0
        self.loading_until_s = 0.0
        self.paused_until_s = 0.0
        self.before_transaction: Callable[[str], None] = lambda function: None
        self.before_request: Callable[[str], None] = lambda function: None
        self._recent: deque[tuple[Request, ...]] = deque(maxlen=RECENT)

    def request(self, process: Process, requests: tuple[Request, ...]) -> list[Any]:
        """The replies, after a while; raises what redis-py would."""
        if not process.is_alive:
            raise Killed
        engine, faults, function = self._engine, self._faults, _function(requests)
        if function:
            self.before_request(function)
        if function in OF_A_LEARNER and requests not in self._recent:
            self._recent.append(requests)
        answer, wait = engine.wait()
        if faults.strikes("lost_request"):
            answer(engine.random.uniform(0.0, 0.3), ConnectionError("Connection reset by peer"))
        elif faults.strikes("delayed_request"):
            self._arrive_later(requests)
            answer(SOCKET_TIMEOUT_S, TimeoutError("Timeout reading from socket"))
        else:
            engine.at(self._latency_s(), lambda: self._arrive(requests, answer))
        replies = wait()
        if isinstance(replies, Exception):
            raise replies
        return replies

    def _arrive(self, requests: tuple[Request, ...], answer: Any) -> None:
        engine, faults, function, now_s = self._engine, self._faults, _function(requests), self._engine.now_s
        # It lies in the server's socket; the client gives up after its own time.
        if self.paused_until_s > now_s:
            engine.at(self.paused_until_s - now_s, lambda: self._arrive(requests, answer))
            answer(SOCKET_TIMEOUT_S, TimeoutError("Timeout reading from socket"))
        elif self.down_until_s > now_s:
            answer(0.0, ConnectionError("Error 111 connecting to store. Connection refused."))
        elif self.loading_until_s > now_s:
            answer(0.0, BusyLoadingError("Redis is loading the dataset in memory"))
        else:
            self.before_transaction(function)
            replies = self._store.execute(requests)
            share = RARE.get(function, 1.0)
            if faults.strikes("late_duplicate", share=share):
                self._arrive_later(requests)
            if faults.strikes("lost_reply", share=share):
                answer(
                    engine.random.choice([0.0, SOCKET_TIMEOUT_S]), TimeoutError("Timeout reading from socket")
                )
            else:
                answer(self._latency_s(), replies)

    def echo(self, functions: Collection[str], *, longest_s: float) -> None:
        """The store has lost something: forgotten requests come again, in any order, by a slower way."""
        random, starts_s = self._engine.random, max(0.0, self.down_until_s - self._engine.now_s)
        for requests in self._recent:
            if _function(requests) not in functions:
                continue
            for _ in range(random.randint(0, 3)):
                delay_s = starts_s + random.uniform(0.0, longest_s)
                self._engine.at(
                    delay_s, functools.partial(self._arrive, requests, lambda delay_s, value: None)
                )

    def repeat_take(self, lane: str, number: int) -> None:
        """What was asked for take `number` of a lane of late comes now."""
        for requests in self._recent:
            if (
                _function(requests) == "take"
                and requests[-1][-5] == number
                and lane_of(requests[-1][3].encode()) == lane
            ):
                self._engine.at(0.0, functools.partial(self._arrive, requests, lambda delay_s, value: None))

    def _arrive_later(self, requests: tuple[Request, ...]) -> None:
        random = self._engine.random
        delay_s = random.uniform(0.0, random.choice([0.1, 2.0, 30.0, LATEST_S]))
        self._engine.at(delay_s, lambda: self._arrive(requests, lambda delay_s, value: None))

    def _latency_s(self) -> float:
        return self._engine.random.expovariate(1 / 0.005)


def _function(requests: tuple[Request, ...]) -> str:
    """The store's function that is called, if any."""
    return function_name(requests[-1][1]) if requests[-1][0] == "FCALL" else ""


class Connection(StoreConnection):
    """The shipped connection over this network."""

    def __init__(self, network: Network, process: Process) -> None:
        self._simulated = Client(network, process)
        super().__init__("redis://store:6379", retry_s=30.0)

    def _connect(self, url: str) -> Any:
        return self._simulated


class Client:
    """The part of `redis.Redis` that the shipped code calls."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process

    def _one(self, *request: Any) -> Any:
        (reply,) = self._network.request(self._process, (request,))
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    def fcall(self, function: str, count: int, *arguments: Any) -> Any:
        return self._one("FCALL", function, count, *arguments)

    def function_load(self, code: str, replace: bool = False) -> Any:
        assert replace, "another process may have been first"
        return self._one("FUNCTION LOAD", code)

    def pipeline(self, transaction: bool = True) -> "Pipeline":
        assert transaction
        return Pipeline(self._network, self._process)

    def info(self, section: str) -> dict[str, Any]:
        return {"redis_version": "7.2.0", "maxmemory_policy": "noeviction"}

    def hget(self, key: str, name: str) -> Any:
        return self._one("HGET", key, name)

    def hmget(self, key: str, names: list[str]) -> Any:
        return self._one("HMGET", key, *names)

    def hset(
        self, key: str, name: Any = None, value: Any = None, mapping: Mapping[Any, Any] | None = None
    ) -> Any:
        pairs = [part for pair in (mapping or {name: value}).items() for part in pair]
        return self._one("HSET", key, *pairs)

    def hsetnx(self, key: str, name: str, value: Any) -> Any:
        return self._one("HSETNX", key, name, value)

    def scan_iter(self, match: str, count: int) -> Iterator[bytes]:
        yield from self._one("KEYS", match)


class Pipeline:
    """MULTI ... EXEC: all commands run, the first refusal is raised, and the pipeline is empty again."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        self._requests: list[Request] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests = []

    def hsetnx(self, *arguments: Any) -> None:
        self._requests.append(("HSETNX", *arguments))

    def fcall(self, *arguments: Any) -> None:
        self._requests.append(("FCALL", *arguments))

    def unlink(self, *keys: Any) -> None:
        self._requests.append(("UNLINK", *keys))

    def hset(self, *arguments: Any) -> None:
        self._requests.append(("HSET", *arguments))

    def execute(self) -> list[Any]:
        requests, self._requests = tuple(self._requests), []
        replies = self._network.request(self._process, requests)
        for number, reply in enumerate(replies, 1):
            if isinstance(reply, ResponseError):
                raise type(reply)(
                    f"Command # {number} ({requests[number - 1][0]} ...) of pipeline caused error: {reply}"
                )
        return replies
