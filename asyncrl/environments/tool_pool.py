"""Workers that run tools without a state: a call goes to any of them, and many calls run at the same time."""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.environments.caller import Call, Caller
from asyncrl.environments.fork_server import BEGINNINGS, ForkServer
from asyncrl.errors import CodeChanged, EnvironmentFault

log = logging.getLogger(__name__)

# Time for which calls may wait behind others in a worker, although another worker may be free sooner.
QUEUE_S = 0.002
# Most calls in a worker; quick ones travel together, which makes them several times cheaper.
MOST_CALLS = 64


class ToolPool:
    """A number of workers. A call that hangs or kills its worker fails alone."""

    def __init__(self, server: ForkServer, count: int, step_s: float) -> None:
        """Run calls for at most `step_s` each in `count` workers."""
        self._server, self._count, self._step_s = server, count, step_s
        self._workers: list[Caller] = []
        self._waiting: deque[Call] = deque()
        self._replacing: set[asyncio.Task[None]] = set()
        # Time of a call, of late.
        self._call_s = QUEUE_S

    async def start(self) -> None:
        """Start all workers, again if their fork server dies meanwhile. Raises EnvironmentFault."""
        for left in reversed(range(BEGINNINGS)):
            starting = [self._add() for _ in range(self._count - len(self._workers))]
            failed = [one for one in await asyncio.gather(*starting, return_exceptions=True) if one]
            if not failed:
                return
            if not left or not isinstance(failed[0], EnvironmentFault) or failed[0].reason == "start":
                raise failed[0]
            log.warning(
                "%d workers for tools did not start and are started again: %s", len(failed), failed[0]
            )

    def ask(self, request: Mapping[str, Any]) -> asyncio.Future[dict[str, Any]]:
        """Return the future of a call's reply. It raises EnvironmentFault if the worker is lost."""
        call = Call(request, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        call.reply.add_done_callback(self._measure)
        self._replace()
        self._dispatch()
        return call.reply

    async def close(self) -> None:
        """Kill all workers."""
        for task in self._replacing:
            task.cancel()
        for worker in self._workers:
            worker.close()

    async def _add(self) -> None:
        worker = Caller(self._step_s, self._lost)
        await worker.start(self._server)
        self._workers.append(worker)
        self._dispatch()

    def _measure(self, reply: asyncio.Future[dict[str, Any]]) -> None:
        if not reply.cancelled() and not reply.exception():
            self._call_s += (reply.result()["seconds"] - self._call_s) / 16
        self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting calls to the workers with the fewest."""
        most = min(MOST_CALLS, max(1, int(QUEUE_S / max(self._call_s, 1e-9))))
        while self._waiting and self._workers:
            worker = min(self._workers, key=lambda one: one.open)
            if worker.open >= most:
                return
            call = self._waiting.popleft()
            if call.reply.done():  # its episode was cancelled
                continue
            try:
                worker.submit(call)
                call.reply.add_done_callback(partial(_retire, worker))
            except EnvironmentFault as fault:
                call.reply.set_exception(fault)

    def _lost(self, behind: Sequence[Call]) -> None:
        self._waiting.extendleft(reversed(behind))
        self._workers = [one for one in self._workers if not one.is_lost]
        self._replace()

    def _replace(self) -> None:
        """Start workers for those that were lost."""
        for _ in range(self._count - len(self._workers) - len(self._replacing)):
            task = asyncio.create_task(self._add_again())
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _add_again(self) -> None:
        try:
            await self._add()
        except (CodeChanged, EnvironmentFault) as fault:
            log.warning("a worker for tools did not start: %s", fault)
            if self._workers or len(self._replacing) > 1:
                return
            if isinstance(fault, EnvironmentFault) and fault.reason == "hung":  # it was not a call that hung
                fault = EnvironmentFault(str(fault), reason="died")
            while self._waiting:  # no worker is left, and none is on its way
                call = self._waiting.popleft()
                if not call.reply.done():
                    call.reply.set_exception(fault)


def _retire(worker: Caller, reply: asyncio.Future[dict[str, Any]]) -> None:
    """Replace a worker without memory, because what filled it may still be there."""
    if not reply.cancelled() and not reply.exception() and reply.result().get("memory"):
        worker.retire()
