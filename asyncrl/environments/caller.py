"""Requests to workers, and what becomes of a request when its worker is lost."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from asyncrl.environments.channel import Channel
from asyncrl.environments.fork_server import BEGINNINGS, ForkServer, Worker
from asyncrl.errors import EnvironmentFault

IDLE = "between two requests"


class Caller:
    """A worker with one request at a time. If it hangs or dies, it is killed, and the request fails."""

    def __init__(self, step_s: float) -> None:
        """Allow `step_s` for each request."""
        self._step_s = step_s
        self._channel = Channel(self._receive, self._lose)
        self._worker: Worker | None = None
        # Of the request without an answer.
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._doing = IDLE
        # Why the worker is lost: `hung`, `died`, or what is wrong with its bytes.
        self._wrong = ""

    async def start(self, server: ForkServer) -> None:
        """Start the worker. Raises EnvironmentFault."""
        self._worker = await server.worker(self._channel)

    @property
    def is_lost(self) -> bool:
        """Whether the worker is gone."""
        return bool(self._wrong)

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply. Raises EnvironmentFault if JSON cannot have the request, or the worker is lost.

        After a cancellation the worker may still be busy: it must be closed.
        """
        if not self._wrong:
            self._channel.send(request)
            self._doing = f"`{request.get('name', request['do'])}`"
            self._reply = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._step_s):
                    return await self._reply
            except TimeoutError:
                self._wrong = "hung"
            except ConnectionError:  # of `_lose`
                pass
            finally:
                self._reply = None
        assert self._worker is not None
        raise await self._worker.fault(self._doing, self._wrong, self._step_s)

    def close(self) -> None:
        """Kill the worker."""
        self._channel.close()
        if self._worker is not None:
            self._worker.kill()

    def _receive(self, message: dict[str, Any]) -> None:
        if self._reply is None:
            raise LookupError("nothing was asked")
        if not isinstance(message["seconds"], float) or not message.keys() & {"value", "error"}:
            raise ValueError("a reply without a value or its time")
        if not self._reply.done():
            self._reply.set_result(message)
        self._doing = IDLE

    def _lose(self, wrong: str) -> None:
        self._wrong = wrong or "died"
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ConnectionError(self._wrong))


log = logging.getLogger(__name__)


class ToolPool:
    """A number of workers with one call each. A call that hangs or kills its worker fails alone."""

    def __init__(self, server: ForkServer, count: int, step_s: float) -> None:
        """Run calls for at most `step_s` each in `count` workers."""
        self._server, self._count, self._step_s = server, count, step_s
        # None stands for a worker that the next call starts.
        self._idle: asyncio.Queue[Caller | None] = asyncio.Queue()

    async def start(self) -> None:
        """Start all workers. Raises EnvironmentFault."""
        for worker in await asyncio.gather(*(self._started() for _ in range(self._count))):
            self._idle.put_nowait(worker)

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a call. Raises EnvironmentFault if the worker is lost."""
        worker, stays = await self._idle.get(), False
        try:
            if worker is not None and worker.is_lost:
                worker.close()
                worker = None
            worker = worker or await self._started()
            reply = await worker.ask(request)
            stays = not reply.get("memory")  # what filled the memory may still be there
        finally:
            if worker is not None and not stays:
                worker.close()
            self._idle.put_nowait(worker if stays else None)
        return reply

    async def _started(self) -> Caller:
        """Start a worker, again if its fork server dies meanwhile."""
        failures = 0
        while True:
            worker = Caller(self._step_s)
            try:
                await worker.start(self._server)
            except EnvironmentFault as fault:
                failures += 1
                if failures == BEGINNINGS or fault.reason == "start":
                    # No call has hung, which the model would be told.
                    reason = "died" if fault.reason == "hung" else fault.reason
                    raise EnvironmentFault(str(fault), reason=reason) from fault
                log.warning("a worker for tools did not start and is started again: %s", fault)
            else:
                return worker
