"""The environment of a config: the user's code in processes of its own, behind the interface of `base`."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.base import Opening, Outcome, Talk
from asyncrl.environments.fork_server import BEGINNINGS, ForkServer, Worker, keep
from asyncrl.environments.loops import Conversation, asked, play_text, play_tool_class, play_tools
from asyncrl.environments.rollouts import Rollouts
from asyncrl.environments.tool_schemas import Toolbox
from asyncrl.errors import CodeChanged, EnvironmentFault

log = logging.getLogger(__name__)

# Time for which calls may wait behind others in a worker, although another worker may be free sooner.
QUEUE_S = 0.002
# Most calls in a worker; quick ones travel together, which makes them several times cheaper.
MOST_CALLS = 64
# Pause before a lost worker is replaced: on a full disk each one dies at its start.
REPLACE_S = 0.1


@dataclass(slots=True, eq=False)
class _Call:
    """A request, and the future of its reply."""

    request: Mapping[str, Any]
    reply: asyncio.Future[dict[str, Any]]
    # The worker that has it, if any has.
    caller: "_Caller | None" = None


class _Caller:
    """A worker that answers in order. If it hangs or dies, it is killed, and the oldest request fails."""

    def __init__(self, step_s: float, lost: Callable[[Sequence[_Call]], None] = lambda behind: None) -> None:
        """Limit a request to `step_s` from when it is the oldest.

        `lost` gets the requests behind the oldest one, which did not begin.
        """
        self._step_s, self._lost = step_s, lost
        self._worker = Worker(self._answered, self._lose)
        # Requests without a reply, and since when the first of them is the oldest.
        self.open: deque[_Call] = deque()
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._fault: asyncio.Task[EnvironmentFault] | None = None
        self.is_lost = False

    async def start(self, server: ForkServer) -> None:
        await server.start_worker(self._worker)

    def ask(self, request: Mapping[str, Any]) -> asyncio.Future[dict[str, Any]]:
        """Return the future of a reply, which raises EnvironmentFault if the worker is lost."""
        call = _Call(request, asyncio.get_running_loop().create_future())
        self.submit(call)
        return call.reply

    def submit(self, call: _Call) -> None:
        """Send a request behind those that are open. Raises EnvironmentFault if JSON cannot have it."""
        if self._fault is not None:
            self._fault.add_done_callback(partial(_fail, [call]))
            return
        self._worker.channel.send(call.request)
        call.caller = self
        self.open.append(call)
        if len(self.open) == 1:
            loop = asyncio.get_running_loop()
            self._since_s = loop.time()
            if self._timer is None:  # one timer for all requests: it looks again when the oldest is due
                self._timer = loop.call_later(self._step_s, self._look)

    def retire(self) -> None:
        """Kill a worker that takes no further request; the open ones, which did not begin, go to `lost`."""
        self.is_lost = True
        self._lost(self.close())

    def close(self) -> list[_Call]:
        """Kill the worker, and return the requests that are not answered."""
        self._worker.kill()
        left = list(self.open)
        self.open.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return left

    def _answered(self, message: dict[str, Any]) -> None:
        if not isinstance(message["seconds"], float) or not message.keys() & {"value", "error"}:
            raise ValueError("a reply without a value or its time")
        call = self.open.popleft()  # IndexError: nothing was asked
        self._since_s = asyncio.get_running_loop().time()
        if not call.reply.done():
            call.reply.set_result(message)

    def _look(self) -> None:
        self._timer, loop = None, asyncio.get_running_loop()
        left_s = self._since_s + self._step_s - loop.time()
        if self.open and left_s <= 0:
            self._lose("hung")
        elif self.open:
            self._timer = loop.call_later(left_s, self._look)

    def _lose(self, reason: str) -> None:
        self.is_lost = True
        left = self.close()
        doing = f"`{left[0].request.get('name', left[0].request['do'])}`" if left else "between two requests"
        self._fault = asyncio.create_task(self._worker.fault(doing, reason, self._step_s))
        self._fault.add_done_callback(partial(_fail, left[:1]))
        self._lost(left[1:])


def _fail(calls: Sequence[_Call], fault: asyncio.Task[EnvironmentFault]) -> None:
    for call in calls:
        if not call.reply.done():
            call.reply.set_exception(fault.result())


class _ToolPool:
    """A number of workers. A call that hangs or kills its worker fails alone."""

    def __init__(self, server: ForkServer, count: int, step_s: float) -> None:
        """Run calls for at most `step_s` each in `count` workers."""
        self._server, self._count, self._step_s = server, count, step_s
        self._workers: list[_Caller] = []
        self._waiting: deque[_Call] = deque()
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
        call = _Call(request, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        call.reply.add_done_callback(partial(self._answered, call))
        self._replace()
        self._dispatch()
        return call.reply

    async def close(self) -> None:
        for task in self._replacing:
            task.cancel()
        for worker in self._workers:
            worker.close()

    async def _add(self) -> None:
        worker = _Caller(self._step_s, self._lost)
        await worker.start(self._server)
        self._workers.append(worker)
        self._dispatch()

    def _answered(self, call: _Call, reply: asyncio.Future[dict[str, Any]]) -> None:
        if not reply.cancelled() and not reply.exception():
            self._call_s += (reply.result()["seconds"] - self._call_s) / 16
            if reply.result().get("memory") and call.caller:
                call.caller.retire()  # what filled the memory may still be there
        self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting calls to the workers with the fewest."""
        most = min(MOST_CALLS, max(1, int(QUEUE_S / max(self._call_s, 1e-9))))
        while self._waiting and self._workers:
            worker = min(self._workers, key=lambda one: len(one.open))
            if len(worker.open) >= most:
                return
            call = self._waiting.popleft()
            if call.reply.done():  # its episode was cancelled
                continue
            try:
                worker.submit(call)
            except EnvironmentFault as fault:
                call.reply.set_exception(fault)

    def _lost(self, behind: Sequence[_Call]) -> None:
        self._waiting.extendleft(reversed(behind))
        self._workers = [one for one in self._workers if not one.is_lost]
        self._replace()

    def _replace(self) -> None:
        """Start workers for those that were lost."""
        for _ in range(self._count - len(self._workers) - len(self._replacing)):
            keep(self._replacing, self._add_again())

    async def _add_again(self) -> None:
        try:
            await asyncio.sleep(REPLACE_S)
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


@dataclass(eq=False)
class Environments:
    """Plays the episodes of a generator."""

    config: EnvironmentConfig
    # `run.environment`, and what `ForkServer` says.
    variables: Sequence[str] = ()
    loaded: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._server = ForkServer(self.config, self.variables, self.loaded)
        # What the user's file has: kind, columns, tools.
        self.description: Mapping[str, Any] = {}
        self._toolbox = Toolbox([])
        self._shared: _ToolPool | Rollouts | None = None

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools, which the model is shown."""
        return self._toolbox.schemas

    async def start(self) -> None:
        """Import the user's file, and look at it. Raises EnvironmentFault."""
        self.description = await self._server.start()
        self._toolbox = Toolbox(self.description["tools"])
        if self.description["kind"] == "tools":
            self._shared = _ToolPool(self._server, self.config.workers, self.config.step_s)
            await self._shared.start()
        elif self.description["kind"] == "rollout":
            self._shared = Rollouts(self._server, self.config)

    async def play(
        self, talk: Talk, row: Mapping[str, Any], *, prompt: Opening, seed: int, episode: int
    ) -> Outcome:
        """Play one episode, as `base.Environment` says."""
        # A row that names its seed is a task made from it.
        columns = self._columns({"seed": seed, "episode": episode} | dict(row) | {"prompt": prompt})
        if isinstance(self._shared, Rollouts):
            return await self._shared.play(talk, columns, seed=seed, place=episode)
        conversation = Conversation(talk, prompt, self.config.max_observation_characters)
        tools, has, step_s = self._toolbox, self.description, self.config.step_s
        if isinstance(self._shared, _ToolPool):
            return await play_tools(conversation, tools, self._shared.ask, step_s=step_s)
        worker, start = _Caller(step_s), {"columns": columns, "seed": seed}
        try:
            await worker.start(self._server)
            if has["kind"] == "text":
                outcome = await play_text(conversation, worker.ask, start, rewards=has["rewards"])
            else:
                outcome = await play_tool_class(
                    conversation, tools, worker.ask, start, rewards=has["rewards"]
                )
            if has["closes"]:
                await asked(worker.ask, "close")
            return outcome
        finally:
            worker.close()

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()
        await self._server.close()

    def _columns(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that the signature names: user code sees no others, so no answers by accident."""
        if missing := sorted(set(self.description["required"]) - given.keys()):
            found = f"environment.uses {self.config.uses} wants column(s) {missing}"
            raise EnvironmentFault(f"{found}, which the row lacks; it has {sorted(given)}", reason="start")
        has = self.description
        unnamed = has["placed"] if has["takes_all"] else given.keys() - has["columns"]
        return {name: value for name, value in given.items() if name not in unnamed}
