"""A warm box: one process in bubblewrap that forks per program, and the reader of its results.

A box shows programs the system and this Python with its packages, and no other file. It has no network and no
variable with a secret. Every program begins with empty scratch directories and alone: what the one before it
started was killed, and a box in which it left files is replaced.
"""

import asyncio
import atexit
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from asyncrl.errors import EnvironmentFault
from asyncrl.sandbox import inside
from asyncrl.sandbox.bubblewrap import SCRATCH, SCRATCH_BYTES, Bubblewrap, environment, limits
from asyncrl.sandbox.seccomp import open_program

# Limit for a box to start, and for a result after the program's own time.
START_S = 60.0
GRACE_S = 10.0
END_S = 5.0
# Of all processes of a program together; a thread counts as a process.
MOST_PROCESSES = 64
MOST_FILES = 10_000
MOST_DESCRIPTORS = 256
# How much is kept of each output of a program, where nothing else is said.
OUTPUT_BYTES = 32768
_PACKAGES = ("site-packages", "dist-packages")
# How a program ended: exit status 0, any other end of its own, or the limit for which it was killed.
Status = Literal["ok", "error", "time", "memory", "processes", "files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end of one program. A program that fails or is killed for a limit is a result, not an error."""

    # The beginning of the output, as UTF-8; other bytes become U+FFFD.
    stdout: str
    # The end of the error output, with the traceback.
    stderr: str
    status: Status
    # Wall time.
    seconds: float
    # Whether output is missing because there was too much of it.
    cut: bool


class Box:
    """A sandbox in bubblewrap, one program at a time: `async with Box() as box: await box.run(code)`.

    It starts with its first program, or when it is entered.
    """

    def __init__(
        self, *, memory_gib: float = 1.0, output_bytes: int = OUTPUT_BYTES, hidden: Sequence[Path] = ()
    ) -> None:
        """Set the memory of all processes of a program together, without files (2 x 256 MiB).

        `output_bytes` are kept of each output. A program sees no `hidden` paths, even among the packages.
        """
        memory_bytes = int(memory_gib * 2**30)
        own = {"NOFILE": MOST_DESCRIPTORS, "FSIZE": SCRATCH_BYTES}
        self._limits = {
            "memory": memory_bytes,
            "output": output_bytes,
            "processes": MOST_PROCESSES,
            "files": MOST_FILES,
            "rlimits": limits() | own,
        }
        # JSON writes a character in up to six bytes.
        self._most_reply_bytes = 2 * 6 * output_bytes + 4096
        packages = [Path(path) for path in sys.path if Path(path).name in _PACKAGES]
        own_file = Path(inside.__file__)
        self._view = Bubblewrap(Path(SCRATCH[0]), packages=packages, files=[own_file], hidden=hidden)
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Raises EnvironmentFault if the sandbox cannot be made, with the reason and the cure."""
        async with self._turn:
            await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, code: str, *, stdin: str = "", seconds: float = 10.0) -> Result:
        """Run a Python program with this standard input, for at most `seconds` of wall and of CPU time.

        A program sees nothing of the programs before it. Calls at the same time wait for each other. Raises
        EnvironmentFault if the sandbox broke; the next call makes another one.
        """
        is_reusable = False
        async with self._turn:
            try:
                await self._start()
                data = json.dumps({"code": code, "stdin": stdin, "seconds": seconds}).encode()
                assert self._process is not None and self._process.stdin is not None
                self._process.stdin.write(inside.LENGTH.pack(len(data)) + data)
                async with asyncio.timeout(GRACE_S):
                    await self._process.stdin.drain()
                reply = await self._receive(seconds + GRACE_S)
                is_reusable = not reply.pop("spent")
                return Result(**reply)
            except OSError as error:  # also a TimeoutError
                raise EnvironmentFault(f"the sandbox accepts no program ({type(error).__name__})") from error
            except (KeyError, TypeError, ValueError) as error:
                raise EnvironmentFault(f"the sandbox answers with no result: {error}") from error
            finally:
                if not is_reusable:
                    await self.close()

    async def close(self) -> None:
        """Kill everything in the box; another call of `run` makes a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()

    async def _start(self) -> None:
        if self._process is not None and self._process.returncode is None:
            return
        # No variable of Python, whose paths are not in the box, and one thread for numerical libraries.
        kept = {name: value for name, value in environment().items() if not name.startswith("PYTHON")}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = [sys.executable, "-X", "utf8", inside.__file__, json.dumps(self._limits)]
        try:
            with open_program(strict=True) as filter_fd:
                self._process = await asyncio.create_subprocess_exec(
                    *self._view.wrap(command, filter_fd=filter_fd),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # its own process group: killed with its children
                    env=kept | threads | {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
                    pass_fds=[filter_fd],
                )
            await self._receive(START_S)
        except (EnvironmentFault, OSError) as error:
            await self.close()
            problem = await asyncio.to_thread(self._view.problem)
            raise EnvironmentFault(f"no sandbox for programs: {problem or error}") from error
        except BaseException:
            await self.close()
            raise

    async def _receive(self, wait_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        stream = self._process.stdout
        try:
            async with asyncio.timeout(wait_s):
                (length,) = inside.LENGTH.unpack(await stream.readexactly(inside.LENGTH.size))
                if length > self._most_reply_bytes:
                    raise EnvironmentFault(f"the sandbox answers with {length} bytes, which is no result")
                reply: dict[str, Any] = json.loads(await stream.readexactly(length))
        except TimeoutError:
            raise EnvironmentFault(f"the sandbox did not answer within {wait_s:g} s") from None
        except asyncio.IncompleteReadError:
            raise EnvironmentFault("the sandbox ended before it answered") from None
        return reply


# Process -> its box and the loop that reads from it. A process that user code forked makes its own. It keeps
# those of its parent: to close that loop here could close descriptors in the parent's, whose epoll it shares.
_boxes: dict[int, tuple[asyncio.Runner, Box]] = {}


def python_result(code: str, *, stdin: str = "", seconds: float = 5.0) -> Result:
    """Run a Python program in a sandbox of its own, with 1 GiB of memory, and return its result.

    The sandbox stays for the next call, which sees nothing of this one. Raises EnvironmentFault if there can
    be no sandbox or if it broke, so that nothing is scored. An `async` function uses `Box` itself.
    """
    if os.getpid() not in _boxes:
        _boxes[os.getpid()] = asyncio.Runner(), Box()
        atexit.register(_close)
    runner, box = _boxes[os.getpid()]
    return runner.run(box.run(code, stdin=stdin, seconds=seconds))


def _close() -> None:
    if os.getpid() in _boxes:
        runner, box = _boxes.pop(os.getpid())
        runner.run(box.close())
        runner.close()
