"""Programs that run in a process of their own: how they are started, spoken to and ended.

A message is its length (4 bytes, little-endian) and then its bytes, which are MessagePack unless said
otherwise. The other side of a channel is never trusted to answer: every wait has a deadline, and a program
that misses it is killed.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import msgpack

from asyncrl.processes import public_environment, stop_process

LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    """One message as it crosses a channel."""
    return LENGTH.pack(len(data)) + data


def pack(message: Mapping[str, Any], *, default: Callable[[Any], Any] | None = None) -> bytes:
    """One MessagePack message; `default` converts values that MessagePack does not know. Raises ValueError,
    TypeError."""
    return framed(msgpack.packb(message, default=default))


def receive(stream: BinaryIO, *, expect: Callable[[int], None] = lambda length: None) -> bytes:
    """The next message. `expect` is called with its length before it is read. Raises EOFError when the other
    side is gone."""
    header = stream.read(LENGTH.size)
    if len(header) == LENGTH.size:
        (length,) = LENGTH.unpack(header)
        expect(length)
        if len(data := stream.read(length)) == length:
            return data
    raise EOFError("the other side of the channel is gone")


def take_message(arrived: bytearray) -> dict[str, Any] | None:
    """Remove the first MessagePack message from what has arrived; None while it is not whole."""
    if len(arrived) < LENGTH.size:
        return None
    end = LENGTH.size + LENGTH.unpack_from(arrived)[0]
    if len(arrived) < end:
        return None
    message: dict[str, Any] = msgpack.unpackb(arrived[LENGTH.size : end])
    del arrived[:end]
    return message


def ending(status: int) -> str:
    """How a process with this exit status ended."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


class Worker:
    """`python -m module <socket fd> <our pid>`, which gets one thread and no secrets and ends when `channel`
    is closed."""

    def __init__(self, module: str) -> None:
        """Raises OSError where this host cannot start it."""
        self.channel, theirs = socket.socketpair()
        self._replies = self.channel.makefile("rb")
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=public_environment() | {"OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # a Ctrl-C in the terminal is the learner's business
                )
            except OSError:
                self._close()
                raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, data: bytes, wait_s: float) -> bytes:
        """The answer to a message. Raises OSError (TimeoutError after `wait_s`) and EOFError."""
        until_s = time.monotonic() + wait_s
        self.channel.settimeout(wait_s)
        self.channel.sendall(framed(data))
        self.channel.settimeout(max(until_s - time.monotonic(), 0.001))
        return receive(self._replies)

    def end(self, *, grace_s: float = 0.0) -> int:
        """Close the channel, wait `grace_s`, then kill. Returns the exit status, -SIGKILL for one that the
        kernel holds on to."""
        self._close()
        try:
            return self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            stop_process(self._process, grace_s=0.0)
        return self._process.returncode or -signal.SIGKILL

    def _close(self) -> None:
        self._replies.close()
        self.channel.close()
