"""A worker that answers requests in order: calls of tools, or the episode of one environment.

in   {do: reset, columns, seed, limit} | {do: step, text, limit} | {do: call, name, arguments, limit}
     {do: reward} | {do: done} | {do: close}
out  {value, seconds}, with `tuple` if user code returned one, and for a call `length`, the number of
     characters before `value` was cut to `limit`
     a `value` that no message can hold has texts of `limit` characters at most
     {error, where, fault, memory, seconds} if user code raised; `fault` if no argument can be the cause,
     `memory` if the process had no memory left; a worker of tools then ends
"""

import asyncio
import errno
import inspect
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from asyncrl import plugins
from asyncrl.environments.json_frames import as_text, packed, read_frame
from asyncrl.environments.user_code import CLOSE, ENDS, REWARDS, TOOLS

MAX_REASON_CHARACTERS = 2000
OURS = os.path.dirname(__file__) + os.sep
# Exceptions of a tool that say nothing about its arguments, whatever the model wrote.
FAULTS = (ConnectionError, TimeoutError)
FAULT_NUMBERS = frozenset({errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EIO})


class Player:
    """Runs user code for one request after the other."""

    def __init__(self, channel: socket.socket, targets: Sequence[Any], *, is_tools: bool) -> None:
        """Serve functions, which are tools, or the one class in `targets`."""
        self._channel, self._target = channel, targets[0]
        self._requests = channel.makefile("rb")
        self._tools = {tool.__name__: tool for tool in targets} if is_tools else None
        self._instance: Any = None
        self._limit = sys.maxsize
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve(self) -> NoReturn:
        """Answer until the socket ends, which raises EOFError or OSError."""
        work: dict[str, Callable[..., dict[str, Any]]] = {
            "call": self._call,
            "reset": self._reset,
            "step": lambda text: self._returned(self._instance.step(text)),
            "reward": lambda: self._returned(self._ask(REWARDS)),
            "done": lambda: self._returned(self._ask(ENDS)),
            "close": lambda: self._returned(getattr(self._instance, CLOSE)()),
        }
        own_pid = os.getpid()
        while True:
            request = read_frame(self._requests)
            started_s = time.perf_counter()
            self._limit = request.pop("limit", sys.maxsize)
            try:
                reply = work[request.pop("do")](**request)
                reply["seconds"] = time.perf_counter() - started_s
                try:
                    frame = packed(reply)
                except ValueError:  # it is too long: long texts are cut, as the parent would
                    frame = packed({**reply, "value": _shortened(reply["value"], self._limit)})
            except BaseException as error:  # noqa: BLE001 - reported to the parent
                reply = described(error) | {"seconds": time.perf_counter() - started_s}
                frame = packed(reply)
            if os.getpid() != own_pid:
                os._exit(0)  # a child that user code forked returned to this loop: it must not reply
            self._channel.sendall(frame)
            if reply.get("memory") and self._tools is not None:
                os._exit(0)  # what filled the memory may still be there: another worker goes on

    def _reset(self, columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        self._instance = self._target()
        return self._returned(self._instance.reset(**columns))

    def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if hasattr(self._target, TOOLS):
            value = self._result(self._instance(name, arguments))
        else:
            tool = self._tools[name] if self._tools is not None else getattr(self._instance, name)
            value = self._result(tool(**arguments))
        text = as_text(value)
        return {"value": text[: self._limit], "length": len(text)}

    def _ask(self, names: tuple[str, ...]) -> Any:
        """The value of the first attribute that exists, None without one; a method is called."""
        one = self._instance
        # A property that raises AttributeError is there, though `hasattr` says no.
        found = next((getattr(one, name) for name in names if name in dir(one) or hasattr(one, name)), None)
        return self._result(found() if callable(found) else found)

    def _returned(self, value: Any) -> dict[str, Any]:
        value = self._result(value)
        return {"value": value, "tuple": isinstance(value, tuple)}

    def _result(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(value)


def described(error: BaseException) -> dict[str, Any]:
    """Return an error of user code, its file and line, and whether it is a fault."""
    is_full = isinstance(error, MemoryError)
    if is_full:  # what its functions hold
        traceback.clear_frames(error.__traceback__)
    frames = traceback.extract_tb(error.__traceback__)
    # The line that the user wrote, and not ours behind it.
    last = ([one for one in frames if not one.filename.startswith(OURS)] or frames)[-1:]
    is_broken = isinstance(error, OSError) and error.errno in FAULT_NUMBERS
    # Libraries of HTTP have errors of their own, which come from those of the connection.
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    is_fault = not isinstance(error, Exception) or is_broken or isinstance(error, ImportError)
    is_fault = is_fault or any(isinstance(one, FAULTS) for one in causes)
    return {
        "error": plugins.described(error, placed=False)[:MAX_REASON_CHARACTERS],
        "where": "".join(f"{one.filename}:{one.lineno}" for one in last),
        "memory": is_full,
        "fault": is_fault or bool(getattr(error, "fault", False)),
    }


def _shortened(value: Any, limit: int) -> Any:
    if isinstance(value, str) and len(value) > limit:
        mark = f"\n[cut: at {limit:,} of {len(value):,} characters]"
        return value[: max(limit - len(mark), 0)] + mark
    if isinstance(value, dict):
        return {key: _shortened(one, limit) for key, one in value.items()}
    return [_shortened(one, limit) for one in value] if isinstance(value, list | tuple) else value
