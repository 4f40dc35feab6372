"""One reward process, seen from the run: user code can hang, crash or print, and the run continues.

It calls one function at a time, for a response, a group or a batch. The time limit of a call
starts when the worker reports that it has begun; until then no user code has seen the response, and a failed
call is repeated with another worker. A worker that is late, dies, or is interrupted within a call is killed
with its process group, so no reply can be taken for another call's. The next call starts another.
"""

import asyncio
import contextlib
import logging
import os
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

import asyncrl
from asyncrl.config.reward_section import RewardConfig
from asyncrl.errors import RewardError
from asyncrl.hosting.processes import kill_group, module_argv
from asyncrl.hosting.workers import LENGTH, Printed, as_column, ending, pack
from asyncrl.rewards.base import RewardInput
from asyncrl.rewards.forms import GIVEN
from asyncrl.sandbox.bubblewrap import PARENT_PID, Bubblewrap, environment, limits
from asyncrl.sandbox.seccomp import open_program

log = logging.getLogger(__name__)

# Limit for a worker to start and import the reward functions, and again to begin a call.
START_S = 60.0
# Number of workers that may fail to begin one call, or to load the functions.
BEGINNINGS = 3
AGAIN_S = 1.0
# Limit for killed workers to end when the pool closes.
END_S = 5.0
MAX_REPLY_BYTES = 1 << 20


# Value of a response, NaN if the function abstains, and the answer in it.
Scored = tuple[float, str | None]


class Divisible(RewardError):
    """A failure that may be that of some responses of a call only."""


class _Lost(RewardError):
    """The worker died or hung. The reward functions are not necessarily the cause."""


class Worker:
    """One process and its pipes; started when needed, killed when in doubt."""

    def __init__(
        self,
        config: RewardConfig,
        sandbox: Bubblewrap | None,
        loaded: Callable[[], None],
        most: dict[str, int],
    ) -> None:
        self._config, self._sandbox, self._loaded, self._most = config, sandbox, loaded, most
        self._process: asyncio.subprocess.Process | None = None
        # What user code printed in the newest process.
        self.printed = Printed()
        # Parts whose functions take `raw_response`, which costs a second decoding.
        self._raw: Sequence[str] = ()
        # Parts whose functions take chat messages as the prompt.
        self._chat: Sequence[str] = ()
        # Tasks that read the output of this process and of killed ones that have not ended yet.
        self._readers: set[asyncio.Task[None]] = set()

    async def call(self, part: str, inputs: Sequence[RewardInput]) -> list[Scored]:
        """Value and answer of responses from one function. A worker that fails is killed."""
        await self.load()
        doing, in_step = f"reward part `{part}`", False
        request = _packed(
            {
                "part": part,
                "prompts": [(part in self._chat and one.chat) or one.prompt for one in inputs],
                "responses": [one.response for one in inputs],
                "columns": [one.measured(raw=part in self._raw) for one in inputs],
                "apart": [*GIVEN, *inputs[0].played],
            }
        )

        async def begin() -> None:
            await self._start()
            await self._send(request)
            await self._receive(lambda one: one.get("started") is True, START_S, "the beginning of a call")

        try:
            await self._insist(begin, (RewardError, OSError), "begin a call")
            limit_s = self._config.timeout_s
            reply = await self._receive(lambda one: _is_judgement(one, len(inputs)), limit_s, doing)
            in_step = not reply.get("spent", False)
            if "error" in reply:
                # In a sandbox, the failed call may have left files in /tmp.
                in_step = in_step and self._sandbox is None
                raise Divisible(f"{doing} {reply['error']}")
            return list(zip(reply["values"], reply["answers"], strict=True))
        finally:
            if not in_step:
                self.kill()

    async def load(self) -> None:
        """Start; if the process dies or hangs, start another one. A reported error is raised immediately."""
        await self._insist(self._start, (_Lost, OSError), "load the functions")

    async def _insist(
        self, attempt: Callable[[], Awaitable[None]], may_pass: tuple[type[Exception], ...], what: str
    ) -> None:
        """Repeat the attempt, each time with a new process, while it raises an error that `may_pass`."""
        for left in reversed(range(BEGINNINGS)):
            try:
                await attempt()
            except may_pass as error:  # for example, no memory for another process
                self.kill()
                if not left:
                    raise RewardError(
                        f"{BEGINNINGS} reward workers in a row did not {what}; the last: {error}"
                    ) from error
                log.warning("a reward worker did not %s, so another one is started: %s", what, error)
                await asyncio.sleep(AGAIN_S)
            else:
                return

    async def _start(self) -> None:
        """Start the process, which loads the functions, unless it is running. Raises RewardError, OSError."""
        if self._process is not None and self._process.returncode is None:
            return
        self.kill()
        self._process = await self._fork()
        self.printed = Printed()
        reader = asyncio.create_task(self.printed.follow_process(self._process))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        memory = {"AS": int(self._config.memory_gib * 2**30)} if self._config.memory_gib else {}
        orders = {
            "functions": [[one.part, one.function, one.params] for one in self._config.functions],
            "limits": memory | (limits() if self._sandbox else {}),
            "sandboxed": self._sandbox is not None,
        }
        try:
            await self._send(_packed(orders))
            reply = await self._receive(
                lambda one: _has(one, raw=list, chat=list, most=dict), START_S, "start of the reward worker"
            )
            if "error" in reply:
                raise RewardError(reply["error"])
            self._raw, self._chat = reply["raw"], reply["chat"]
            self._most |= reply["most"]
            self._loaded()
        except BaseException:
            self.kill()
            raise

    async def _fork(self) -> asyncio.subprocess.Process:
        parent = PARENT_PID if self._sandbox else os.getpid()
        command = module_argv("asyncrl.rewards.worker", str(parent))
        with open_program() if self._sandbox else contextlib.nullcontext() as filter_fd:
            if self._sandbox and filter_fd:
                command = self._sandbox.wrap(command, filter_fd=filter_fd)
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # its own process group: killed with its children
                env={"OMP_NUM_THREADS": "1"}
                | (environment("ASYNCRL_RUN_DIRECTORY") if self._sandbox else os.environ),
                pass_fds=[filter_fd] if filter_fd else [],
            )

    def kill(self) -> None:
        """Kill the process with its group."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        kill_group(process.pid)

    async def end(self) -> None:
        """Kill the process, and wait until all killed ones have ended, at most `END_S`."""
        self.kill()
        if self._readers:
            _, pending = await asyncio.wait(self._readers, timeout=END_S)
            for reader in pending:  # a child that left the process group still holds the pipe
                reader.cancel()

    async def _send(self, frame: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(frame)
            async with asyncio.timeout(START_S):
                await self._process.stdin.drain()
        except (ConnectionError, TimeoutError) as error:
            raise _Lost(
                f"the reward worker accepts no calls ({type(error).__name__}){self.printed.note}"
            ) from error

    async def _receive(
        self, is_expected: Callable[[dict[str, Any]], bool], limit_s: float, doing: str
    ) -> dict[str, Any]:
        """The next reply, which is the expected one, or has `error`."""
        assert self._process is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
                if length > MAX_REPLY_BYTES:
                    raise RewardError(
                        f"{doing}: the worker's reply is not a frame ({length} bytes){self.printed.note}"
                    )
                reply = msgpack.unpackb(await self._process.stdout.readexactly(length))
        except TimeoutError:
            late = f"{doing} took longer than {limit_s:g} s and was killed"
            raise _Lost(f"{late}{self.printed.note}") from None
        except (asyncio.IncompleteReadError, ValueError, struct.error) as error:
            status = "its pipe is closed, or carries no messages"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    status = ending(await self._process.wait())
            raise _Lost(f"{doing}: the worker process died ({status}){self.printed.note}") from error
        if isinstance(reply, dict) and ("error" in reply or is_expected(reply)):
            return reply
        wrong = "the reward worker is out of step, because user code wrote to its pipe"
        raise RewardError(f"{doing}: {wrong}{self.printed.note}")


def _has(reply: dict[str, Any], **kinds: type) -> bool:
    return all(isinstance(reply.get(name), kind) for name, kind in kinds.items())


def _is_judgement(reply: dict[str, Any], count: int) -> bool:
    """Whether a reply has a value and an answer for each of `count` responses."""
    return (
        _has(reply, values=list, answers=list)
        and len(reply["values"]) == len(reply["answers"]) == count
        and all(isinstance(one, float) for one in reply["values"])
        and all(isinstance(one, str | None) for one in reply["answers"])
    )


def _packed(message: Mapping[str, Any]) -> bytes:
    try:
        return pack(message, default=as_column)
    except ValueError as error:  # nested too deeply, or text that is not Unicode
        raise Divisible(f"the reward worker cannot be sent this row: {error}; fix the dataset") from error


def reward_sandbox(functions: Sequence[str], run_root: Path) -> Bubblewrap:
    """The sandbox for reward functions as in the config. `run_root` is hidden, except reward files in it.

    A worker also sees the working directory, but no other run and no file with a private name.
    """
    places = [Path(function.rpartition(":")[0]) for function in functions]
    files = [place.absolute() for place in places if place.suffix == ".py" and place.is_file()]
    return Bubblewrap(
        directory=Path.cwd(),
        own=[Path.cwd(), *(file.parent for file in files)],
        packages=[Path(path).absolute() for path in (asyncrl.__path__[0], *sys.path)],
        files=files,
        hidden=[run_root],
    )
