"""Requests to one worker, and what becomes of them when the worker is lost."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.environments.channel import Channel
from asyncrl.environments.fork_server import ForkServer, Worker
from asyncrl.errors import EnvironmentFault


@dataclass(slots=True, eq=False)
class Call:
    """A request, and the future of its reply."""

    request: Mapping[str, Any]
    reply: asyncio.Future[dict[str, Any]]


class Caller:
    """A worker that answers in order. If it hangs or dies, it is killed, and the oldest request fails."""

    def __init__(self, step_s: float, lost: Callable[[Sequence[Call]], None] | None = None) -> None:
        """Limit a request to `step_s` from when it is the oldest.

        `lost` gets the requests behind the oldest one, which did not begin; without it they fail too.
        """
        self._step_s, self._lost = step_s, lost
        self._channel = Channel(self._answered, lambda wrong: self._lose(wrong or "died"))
        # Requests without a reply, and since when the first of them is the oldest.
        self._open: deque[Call] = deque()
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._worker: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._fault: asyncio.Task[EnvironmentFault] | None = None
        self._is_spent = False

    async def start(self, server: ForkServer) -> None:
        """Start the worker. Raises EnvironmentFault."""
        self._worker.set_result(await server.worker(self._channel))

    @property
    def open(self) -> int:
        """Number of requests without a reply."""
        return len(self._open)

    @property
    def is_lost(self) -> bool:
        """Whether the worker is gone."""
        return self._fault is not None or self._is_spent

    def ask(self, request: Mapping[str, Any]) -> asyncio.Future[dict[str, Any]]:
        """Return the future of a reply, which raises EnvironmentFault if the worker is lost."""
        call = Call(request, asyncio.get_running_loop().create_future())
        self.submit(call)
        return call.reply

    def submit(self, call: Call) -> None:
        """Send a request behind those that are open. Raises EnvironmentFault if JSON cannot have it."""
        if self._fault is not None:
            self._fault.add_done_callback(partial(_fail, [call]))
            return
        self._channel.send(call.request)
        self._open.append(call)
        if len(self._open) == 1:
            loop = asyncio.get_running_loop()
            self._since_s = loop.time()
            if self._timer is None:  # one timer for all requests: it looks again when the oldest is due
                self._timer = loop.call_later(self._step_s, self._look)

    def close(self) -> None:
        """Kill the worker."""
        self._hang_up()
        if self._worker.done():
            self._worker.result().kill()

    def retire(self) -> None:
        """Kill a worker that takes no further request; the open ones, which did not begin, go to `lost`."""
        self._is_spent = True
        left = self._hang_up()
        self.close()
        if self._lost:
            self._lost(left)

    def _hang_up(self) -> list[Call]:
        """Close the channel, and return what is not answered."""
        self._channel.close()
        left = list(self._open)
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return left

    def _answered(self, message: dict[str, Any]) -> None:
        call = self._open.popleft()  # IndexError: nothing was asked
        self._since_s = asyncio.get_running_loop().time()
        if not isinstance(message["seconds"], float) or not message.keys() & {"value", "error"}:
            raise ValueError("a reply without a value or its time")
        if not call.reply.done():
            call.reply.set_result(message)

    def _look(self) -> None:
        self._timer, loop = None, asyncio.get_running_loop()
        left_s = self._since_s + self._step_s - loop.time()
        if self._open and left_s <= 0:
            self._lose("hung")
        elif self._open:
            self._timer = loop.call_later(left_s, self._look)

    def _lose(self, reason: str) -> None:
        left = self._hang_up()
        doing = f"`{left[0].request.get('name', left[0].request['do'])}`" if left else "between two requests"
        failing, behind = (left[:1], left[1:]) if self._lost else (left, [])
        self._fault = asyncio.create_task(self._describe(doing, reason))
        self._fault.add_done_callback(partial(_fail, failing))
        if self._lost:
            self._lost(behind)

    async def _describe(self, doing: str, reason: str) -> EnvironmentFault:
        return await (await self._worker).fault(doing, reason, self._step_s)


def _fail(calls: Sequence[Call], fault: asyncio.Task[EnvironmentFault]) -> None:
    for call in calls:
        if not call.reply.done():
            call.reply.set_exception(fault.result())
