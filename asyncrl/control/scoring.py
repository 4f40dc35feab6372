"""Calls of scorers: token ids, or a chat, go to a process of this host, which answers.

Each scorer listens on a private socket file. A client connects to all of one name, and any of them answers:
messages go only to scorers that are connected. A call that a dying scorer has taken gets no answer; the
caller asks again, which is harmless, because an answer depends on the request only.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgpack
import zmq
import zmq.asyncio

from asyncrl.control.sockets import listen, set_options
from asyncrl.errors import EngineError
from asyncrl.files import socket_path
from asyncrl.rewards.base import Question, RewardInput, Unanswered, number

log = logging.getLogger(__name__)
MAX_CALL_BYTES = 1 << 24
# Seconds for loading a scorer's model, and until a call without a number, or a judge's words, is repeated.
START_S = 900.0
ANSWER_S = 5.0
WORDS_S = 30.0
# What a scorer of any kind answers when it is ready.
NOTHING = {"ids": [0, 0]}

# A number, or the bytes of an array, for {"ids": token ids}; a chat completion for {"messages": ...}.
Score = Callable[[Mapping[str, Any]], Awaitable[Any]]


def endpoint_of(directory: Path, name: str, index: int) -> str:
    """Return where a scorer of this host listens."""
    return f"ipc://{socket_path(directory / f'{name}.{index}.sock')}"


class ScorerService:
    """The Service of the scorers of one name."""

    def __init__(
        self, name: str, directory: Path, count: int, *, call_s: float, remembers: bool, writes: bool = False
    ) -> None:
        """Take the directory in which `count` of them listen, and the limit of a call with its repetitions.

        `writes` if they answer in words.
        """
        self.remembers = remembers
        # A call that a dying scorer has taken ends before its caller gives up, who then asks another one.
        self._most_s = 0.9 * call_s
        self._name, self._is_ready, self._answer_s = name, False, WORDS_S if writes else ANSWER_S
        self._context: Any = zmq.asyncio.Context()
        self._socket = cast(Any, self._context.socket(zmq.DEALER))
        set_options(self._socket, max_bytes=MAX_CALL_BYTES)
        # Without it, calls would queue for scorers that do not run.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        for index in range(count):
            self._socket.connect(endpoint_of(directory, name, index))
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._reader = asyncio.create_task(self._read())

    def questions(self, one: RewardInput) -> list[Question]:
        return [Question(request={"ids": list(one.token_ids)}, read=lambda reply: (number(reply), ""))]

    async def admit(self, question: Question) -> None:
        """Wait for a scorer, which may be loading its model."""
        limit_s = min(ANSWER_S, START_S)
        while not self._is_ready:
            try:
                await self._within(NOTHING, limit_s)
                self._is_ready = True
            except Unanswered as failure:
                # A scorer that has died since may have taken the call: another one gets it again.
                if not failure.may_pass or limit_s >= START_S:
                    raise
                limit_s = min(2.0 * limit_s, START_S)

    async def ask(self, question: Question) -> Any:
        limit_s = min(self._answer_s, self._most_s)
        try:
            return await self._within(question.request, limit_s)
        except Unanswered as failure:
            # Calls may only be waiting for one another, so the next ones get more time.
            if failure.may_pass:
                self._answer_s = 2.0 * limit_s
            raise

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        self._context.destroy(linger=0)

    async def _within(self, request: Mapping[str, Any], limit_s: float) -> Any:
        """The answer of one scorer. Raises Unanswered."""
        data = msgpack.packb(request, unicode_errors="replace")
        if len(data) > MAX_CALL_BYTES:
            found = f"a call of the scorer `{self._name}` has {len(data)} bytes, allowed are {MAX_CALL_BYTES}"
            raise Unanswered(f"{found}; shorten the question", reason="refused", may_pass=False)
        key = next(self._numbers).to_bytes(8)
        answer = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit_s):
                await self._socket.send_multipart([key, data])
                return await answer
        except TimeoutError:
            found = f"no scorer `{self._name}` answered within {limit_s:g} s"
            text = f"{found}; logs/*{self._name}.*.out of the run directory say why"
            raise Unanswered(text, reason="unavailable") from None
        finally:
            # Also when the caller's own time is over: who asks next waits for a scorer.
            self._is_ready = self._is_ready and answer.done() and not answer.cancelled()
            del self._waiting[key]

    async def _read(self) -> None:
        while True:
            key, data = await self._socket.recv_multipart()
            answer, (score, error) = self._waiting.get(key), msgpack.unpackb(data)
            if answer is None or answer.done():
                continue
            if error is None:
                answer.set_result(score)
            else:
                said = f"the scorer `{self._name}` says: {error}"
                answer.set_exception(Unanswered(said, reason="refused", may_pass=False))


async def serve_scores(endpoint: str, score: Score) -> None:
    """Answer calls until cancelled. Raises ControlError for an endpoint that cannot be used."""
    listening: Any = listen(endpoint, None, max_bytes=MAX_CALL_BYTES, kind=zmq.asyncio.Context)
    router, close = listening

    async def answer(peer: bytes, number: bytes, data: bytes) -> None:
        try:
            reply: list[Any] = [await score(msgpack.unpackb(data)), None]
        except EngineError as error:
            reply = [None, str(error)]
        except Exception as error:
            log.exception("a call of %d bytes failed", len(data))
            # If the engine is dead, this raises too and ends the process; the callers ask its successor.
            await score(NOTHING)
            reply = [None, f"{type(error).__name__}: {error}"]
        with contextlib.suppress(zmq.ZMQError):  # the caller is gone
            await router.send_multipart([peer, number, msgpack.packb(reply)])

    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(answer(*await router.recv_multipart()))
    finally:
        close(0)
