"""Starts, watches and ends the processes of an environment; `episode_worker` is their program.

A process that hangs or breaks the protocol is killed with its process group. A lost fork server starts again.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.episode_worker import PLACE, REAP_AGAIN_S, START
from asyncrl.environments.json_frames import Channel, packed
from asyncrl.errors import EnvironmentFault
from asyncrl.files import with_cure
from asyncrl.hosting.processes import kill_group, public_environment
from asyncrl.hosting.workers import Printed, Scratch, ending

log = logging.getLogger(__name__)

# Limit for a process to import the user's file.
START_S = 60.0
# Limit for the fork server to fork.
FORK_S = 20.0
# Orders under way, which the socket's buffer must hold.
MOST_ORDERS = 32
# Starts of the fork server that may fail one after the other, and the pause between them.
BEGINNINGS = 3
AGAIN_S = 1.0
# Limit for the exit status of a worker to arrive, and for killed processes to end.
END_S = 5.0
# Libraries start no threads when they are imported, because a process with threads cannot fork safely.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "RAYON")}
# Sets have the same order in all processes, of all fork servers, so that episodes with one seed are equal.
ONE_HASH = {"PYTHONHASHSEED": "0"}
# RLIMIT_*, soft and hard.
LIMITS = {"CORE": 0, "NOFILE": 1024}


class Worker:
    """A process that runs user code, and the channel to it; `ForkServer.start_worker` starts it."""

    program: "_Program"
    number: int
    directory: Path

    def __init__(self, receive: Callable[[dict[str, Any]], None], lose: Callable[[str], None]) -> None:
        """`receive` gets each message. `lose` is called once, with `died` or what is wrong with its bytes."""
        self.channel = Channel(receive, lambda wrong: lose(wrong or "died"))
        # The process id from the start, and the exit status from when the fork server has reaped it.
        self.pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._is_killed = False

    def kill(self) -> None:
        """Close the channel, and kill a process that has started, with what it started."""
        self.channel.close()
        if self.pid.done() and not self.pid.exception() and not self._is_killed:
            self._is_killed = True
            self.program.kill_worker(self)

    async def fault(self, doing: str, reason: str, limit_s: float) -> EnvironmentFault:
        """Kill the process, and describe why: `reason` is `hung`, or what `lose` was called with."""
        await asyncio.wait({self.pid})
        self.kill()
        how = await self.program.ended(self)
        if reason == "hung":
            text = f"took longer than {limit_s:g} s and was killed"
        else:
            text = f"the process died ({how})" if reason == "died" else f"the process {reason} and was killed"
        slug = reason if reason in ("hung", "died") else "returned"
        return EnvironmentFault(f"{doing}: {text}{self.program.printed.note}", reason=slug)


@dataclass(eq=False)
class ForkServer:
    """The processes that have imported the user's file."""

    config: EnvironmentConfig
    # Patterns of environment variables that workers get although they look secret.
    variables: Sequence[str] = ()
    # Called after each import of the user's file; raises if it must not be used.
    loaded: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._scratch: Scratch | None = None
        self._program: _Program | None = None
        self._programs: set[_Program] = set()
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def start(self) -> Mapping[str, Any]:
        """Import the user's file, and return its description. Raises EnvironmentFault."""
        if shutil.which(python := _python_of(self.config)) is None:
            found = f"environment.python: there is no program {python}"
            raise EnvironmentFault(f"{found}; give the path of a Python interpreter", reason="start")
        self._scratch = Scratch("asyncrl-environment-")
        program = await self._running()
        if not program.forks:
            log.warning(
                "the import of %s started %d threads, and processes with threads cannot fork: each worker is "
                "a new interpreter that imports it again; start threads in `reset` and episodes start faster",
                self.config.uses,
                program.threads - 1,
            )
        return program.description

    async def start_worker(self, worker: Worker) -> None:
        """Start the process of a worker. Raises EnvironmentFault."""
        assert self._scratch is not None
        program = await self._running()
        if not program.forks:
            program = await self._begin()
        worker.program, worker.number = program, next(self._numbers)
        worker.directory = self._scratch.directory / str(worker.number)
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise _no_process(error) from error
        with theirs:
            await asyncio.get_running_loop().create_connection(lambda: worker.channel, sock=ours)
            try:
                await program.serve(worker, theirs)
            except BaseException:
                worker.channel.close()
                if not program.forks:
                    program.kill()
                raise

    async def close(self) -> None:
        """Kill all processes and remove their files. It takes twice `END_S` at most."""
        for program in self._programs:
            program.kill()
        await asyncio.gather(*(program.buried() for program in self._programs))
        if self._scratch is not None:
            await self._scratch.end()

    async def _running(self) -> "_Program":
        """The fork server, which is started again when it is gone."""
        async with self._starting:
            for left in reversed(range(BEGINNINGS)):
                if self._program is not None and (self._program.is_alive or not self._program.forks):
                    break
                if self._program is not None:
                    log.warning("the fork server of %s is gone; another one is started", self.config.uses)
                try:
                    self._program = await self._begin()
                    if not self._program.forks:  # it has said what it found
                        self._program.kill()
                except EnvironmentFault as error:
                    if not left or error.reason == "start":
                        raise EnvironmentFault(str(error), reason="start") from error
                    log.warning("an environment process did not start, so another one is started: %s", error)
                    await asyncio.sleep(AGAIN_S)
            assert self._program is not None
            return self._program

    async def _begin(self) -> "_Program":
        self._programs = {program for program in self._programs if program.is_alive or program.tasks}
        assert self._scratch is not None
        try:
            program = _Program()
            self._programs.add(program)
            await program.start(self.config, public_environment(self.variables) | self._scratch.variables)
        except OSError as error:
            raise _no_process(error) from error
        try:
            self.loaded()
        except BaseException:
            program.kill()
            raise
        return program


class _Program:
    """One process that has imported the user's file: the fork server, or a worker that cannot fork."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._control, self._theirs = socket.socketpair()
        self._channel = Channel(self._receive, lambda wrong: self.kill())
        self._described: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._workers: dict[int, Worker] = {}  # those that have not ended, by number
        self._to_reap: list[int] = []
        self._orders = asyncio.Semaphore(MOST_ORDERS)
        self._process: asyncio.subprocess.Process | None = None
        self.printed = Printed()
        self.tasks: set[asyncio.Task[None]] = set()
        # Whether it follows orders; the number of its threads; what the user's file has.
        self.is_alive = True
        self.threads = 1
        self.description: Mapping[str, Any] = {}

    @property
    def forks(self) -> bool:
        return self.threads == 1

    async def start(self, config: EnvironmentConfig, variables: Mapping[str, str]) -> None:
        """Start the process, and wait for the import. Raises EnvironmentFault and OSError."""
        uses = [config.uses] if isinstance(config.uses, str) else list(config.uses)
        memory = {"AS": int(config.memory_gib * 2**30)} if config.memory_gib else {}
        python, descriptor = _python_of(config), self._theirs.fileno()
        try:
            with self._theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *(python, "-c", START, PLACE, str(descriptor), str(os.getpid())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=[descriptor],
                    env=ONE_THREAD | ONE_HASH | dict(variables),
                    start_new_session=True,  # its own process group: killed with its children
                )
            keep(self.tasks, self.printed.follow_process(self._process))
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: self._channel, sock=self._control)
            self._channel.send({"uses": uses, "limits": LIMITS | memory})
            async with asyncio.timeout(START_S):
                answer = await self._described
        except TimeoutError:
            self.kill()
            found = f"environment.uses {config.uses}: the import takes longer than {START_S:g} s"
            raise EnvironmentFault(f"{found}{self.printed.note}", reason="hung") from None
        except BaseException:
            self.kill()
            raise
        if "error" in answer:
            self.kill()
            await self.buried()  # all that it printed has arrived then
            found = f"environment.uses {config.uses}: {answer['error']}"
            raise EnvironmentFault(f"{found}{self.printed.note}", reason="start")
        self.description, self.threads = answer["description"], answer["threads"]

    async def serve(self, worker: Worker, theirs: socket.socket) -> None:
        """Have the worker at the other end of its socket. Raises EnvironmentFault."""
        order = packed({"serve": worker.number, "directory": str(worker.directory), "fork": self.forks})
        async with self._orders:
            self._workers[worker.number] = worker
            try:
                socket.send_fds(self._control, [order], [theirs.fileno()])
                async with asyncio.timeout(FORK_S):
                    await asyncio.shield(worker.pid)
            except asyncio.CancelledError:
                worker.pid.add_done_callback(lambda _: worker.kill())
                raise
            except (OSError, TimeoutError) as error:
                self.kill()  # also what it forks late
                found = f"the fork server of the environment does not fork ({type(error).__name__})"
                reason = "hung" if isinstance(error, TimeoutError | BlockingIOError) else "died"
                raise EnvironmentFault(f"{found}; it was killed", reason=reason) from error

    def kill_worker(self, worker: Worker) -> None:
        """Kill a worker and its group; remove its files when it has ended."""
        # The fork server does not reap a worker before it is told to, so this is still the worker's number.
        for kill in (os.killpg, os.kill):  # a worker that was just forked has no group yet
            with contextlib.suppress(ProcessLookupError):
                kill(worker.pid.result(), signal.SIGKILL)
        if not self.forks:
            self.kill()
        else:
            self._to_reap.append(worker.number)
            if len(self._to_reap) == 1:
                asyncio.get_running_loop().call_soon(self._reap)
        keep(self.tasks, self._tidy(worker))

    async def ended(self, worker: Worker) -> str:
        """Describe how a killed or dead worker ended."""
        try:
            async with asyncio.timeout(END_S):
                if not self.forks and self._process:
                    return ending(await self._process.wait())
                return ending(await asyncio.shield(worker.status))
        except TimeoutError:
            return "its socket is closed"
        except EnvironmentFault as error:
            return str(error)

    def kill(self) -> None:
        """Kill the process, its group and its workers."""
        self.is_alive = False
        self._channel.close()
        waiting: list[asyncio.Future[Any]] = [self._described]
        for worker in self._workers.values():
            waiting += [worker.pid, worker.status]
            if worker.pid.done() and not worker.pid.exception():
                kill_group(worker.pid.result())
        if self._process and self._process.returncode is None:
            kill_group(self._process.pid)
        for future in waiting:
            if not future.done():
                text = f"the fork server of the environment died{self.printed.note}"
                future.set_exception(EnvironmentFault(text, reason="died"))
                future.exception()  # it need not be awaited

    async def buried(self) -> None:
        """Wait until everything has ended, at most `END_S`."""
        if not self.tasks:
            return
        _, left = await asyncio.wait(self.tasks, timeout=END_S)
        for task in left:  # a process that left the group still holds the pipe
            task.cancel()

    def _reap(self) -> None:
        """Have the killed workers reaped; again soon if the fork server is busy."""
        while self._to_reap and self.is_alive:
            try:
                # A message this small is sent whole or not at all.
                self._control.send(packed({"reap": self._to_reap[:MOST_ORDERS]}))
            except BlockingIOError:
                asyncio.get_running_loop().call_later(REAP_AGAIN_S, self._reap)
                return
            except OSError:
                return  # it is dead, which its channel reports
            del self._to_reap[:MOST_ORDERS]

    def _receive(self, message: dict[str, Any]) -> None:
        if "serving" in message and "error" in message:
            found = f"the fork server of the environment cannot fork: {message['error']}"
            cure = "let the user's file close what its import opens, or free memory and processes"
            fault = EnvironmentFault(f"{found}; {cure}", reason="died")
            self._workers.pop(message["serving"]).pid.set_exception(fault)
        elif "serving" in message:
            self._workers[message["serving"]].pid.set_result(int(message["pid"]))
        elif "ended" in message:
            self._workers.pop(message["ended"]).status.set_result(int(message["status"]))
        else:
            self._described.set_result(message)

    async def _tidy(self, worker: Worker) -> None:
        await self.ended(worker)
        try:
            worker.directory.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # it has files
            await asyncio.to_thread(shutil.rmtree, worker.directory, ignore_errors=True)


def keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Begin a task, which is one of `tasks` until it ends."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _no_process(error: OSError) -> EnvironmentFault:
    return EnvironmentFault(with_cure(error, "a process of the environment cannot start"), reason="died")


def _python_of(config: EnvironmentConfig) -> str:
    return str(config.python or sys.executable)
