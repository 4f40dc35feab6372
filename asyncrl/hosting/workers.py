"""Starts and ends programs in processes of their own, and exchanges messages with them.

A message is its length (4 bytes, little-endian) and then its bytes, which are MessagePack unless said
otherwise. Every wait for the other side has a deadline, and a program that misses it is killed.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from select import POLLIN, poll
from typing import IO, Any

import msgpack

from asyncrl.hosting.processes import module_argv, public_environment, stop_processes

LENGTH = struct.Struct("<I")
# Limit for `Scratch.end`.
END_S = 5.0
# Output of user code is counted, and only its end is kept, for the error message.
OUTPUT_TAIL_BYTES = 4096
# Standard input ends with the process that has its other end, however that process ends.
_ENDER = """
import shutil, sys
from asyncrl.hosting.processes import end_marked
sys.stdin.buffer.read()
end_marked(sys.argv[1])
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""


def as_column(value: Any) -> Any:
    """`default` for rows: an integer of more than 64 bits becomes its digits of type 0, all else text."""
    return msgpack.ExtType(0, b"%d" % value) if isinstance(value, int) else str(value)


def pack(message: Mapping[str, Any], *, default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a MessagePack message. `default` converts other values. Raises ValueError, TypeError."""
    data: bytes = msgpack.packb(message, default=default)
    return LENGTH.pack(len(data)) + data


def receive(stream: IO[bytes]) -> bytes:
    """Read the next message. Raises EOFError."""
    header = stream.read(LENGTH.size)
    if len(header) == LENGTH.size:
        (length,) = LENGTH.unpack(header)
        if len(data := stream.read(length)) == length:
            return data
    raise EOFError("the other side of the channel is gone")


def ending(status: int) -> str:
    """Describe how a process with this exit status ended."""
    names = {-one.value: one.name for one in signal.Signals}  # most real-time signals have none
    return f"killed by {names.get(status, f'signal {-status}')}" if status < 0 else f"exit status {status}"


class Worker:
    """Runs `python -m module <socket fd> <our pid>` with one thread and no secrets until `channel` closes.

    The program answers messages, one after the other.
    """

    def __init__(self, module: str) -> None:
        """Start the program. Raises OSError."""
        self.channel, theirs = socket.socketpair()
        self._replies = self.channel.makefile("rb")
        with theirs:
            try:
                self._process = subprocess.Popen(
                    module_argv(module, str(theirs.fileno()), str(os.getpid())),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=public_environment() | {"OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # only the learner handles a Ctrl-C in the terminal
                )
            except OSError:
                self.close()
                raise

    def ask(self, data: bytes, wait_s: float, meanwhile: Callable[[], None] = lambda: None) -> bytes:
        """Send a message and return the answer. Raises OSError (TimeoutError after `wait_s`) and EOFError.

        `meanwhile` is called every second until the answer comes.
        """
        until_s = time.monotonic() + wait_s
        self.channel.settimeout(wait_s)
        self.channel.sendall(LENGTH.pack(len(data)) + data)
        answers = poll()  # `select` takes no descriptor above 1,023
        answers.register(self.channel, POLLIN)
        while (left_s := until_s - time.monotonic()) > 1.0 and not answers.poll(1000):
            meanwhile()
        self.channel.settimeout(max(left_s, 0.001))
        return receive(self._replies)

    def close(self) -> None:
        self._replies.close()
        self.channel.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Close the channel, and kill the process."""
        self.close()
        stop_processes([self._process], grace_s=0.0)


class Scratch:
    """A temporary directory for processes of user code, and a variable that they inherit.

    A process of ours outlives us, however we end. It kills all processes that have the variable, also stopped
    ones and those that left their session, and removes the directory.
    """

    def __init__(self, prefix: str) -> None:
        """Make the directory, whose name begins with `prefix`. Raises OSError."""
        mark = secrets.token_hex(16)
        self.variables = {"ASYNCRL_GENERATOR": mark}
        self.directory = Path(tempfile.mkdtemp(prefix=prefix))
        # Not asyncio's, which kills a process that it is not told to wait for.
        self._ender = subprocess.Popen(
            [sys.executable, "-P", "-c", _ENDER, f"ASYNCRL_GENERATOR={mark}", str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a signal to our group is not for it
        )

    async def end(self) -> None:
        """Kill the processes and remove the directory, in `END_S` at most."""
        assert self._ender.stdin is not None
        self._ender.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._ender.wait, END_S)


class Printed:
    """Output of user code: its size, and its end."""

    def __init__(self) -> None:
        self._total_bytes = 0
        self._tail = b""

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Read until the stream ends, so that no process blocks on a full pipe."""
        while chunk := await stream.read(65536):
            self._total_bytes += len(chunk)
            self._tail = (self._tail + chunk)[-OUTPUT_TAIL_BYTES:]

    async def follow_process(self, process: asyncio.subprocess.Process) -> None:
        """Read the standard error of a process, and wait until it has ended."""
        assert process.stderr is not None
        await self.follow(process.stderr)
        await process.wait()

    @property
    def text(self) -> str:
        """The end of the output."""
        return self._tail.decode("utf-8", "replace").strip()[-500:]

    @property
    def note(self) -> str:
        """The end of an error message about the process; empty without output."""
        dropped = self._total_bytes - len(self._tail)
        before = f" ({dropped:,} bytes before were dropped)" if dropped else ""
        return f"; it last printed{before}: {self.text}" if self.text else ""
