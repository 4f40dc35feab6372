"""Requests to one worker, and what becomes of them when the worker is lost."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.environments.channel import Call, Requests
from asyncrl.environments.fork_server import ForkServer, Worker
from asyncrl.errors import EnvironmentFault


class Caller:
    """A worker that answers in order. If it hangs or dies, it is killed, and the oldest request fails."""

    def __init__(self, step_s: float, lost: Callable[[Sequence[Call]], None] | None = None) -> None:
        """`lost` gets the requests behind the oldest one, which did not begin; without it they fail too."""
        self._step_s, self._lost = step_s, lost
        self._requests = Requests(step_s, self._lose)
        self._worker: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._fault: asyncio.Task[EnvironmentFault] | None = None
        self._is_spent = False

    async def start(self, server: ForkServer) -> None:
        """Start the worker. Raises EnvironmentFault."""
        self._worker.set_result(await server.worker(self._requests.channel))

    @property
    def open(self) -> int:
        """Number of requests without a reply."""
        return len(self._requests)

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
        else:
            self._requests.submit(call)

    def close(self) -> None:
        """Kill the worker."""
        self._requests.close()
        if self._worker.done():
            self._worker.result().kill()

    def retire(self) -> None:
        """Kill a worker that takes no further request; the open ones, which did not begin, go to `lost`."""
        self._is_spent = True
        left = self._requests.close()
        self.close()
        if self._lost:
            self._lost(left)

    def _lose(self, reason: str, left: list[Call]) -> None:
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
