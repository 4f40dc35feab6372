"""One reward process: `python -m asyncrl.rewards.worker PARENT_PID`. Runs user code, so it may be killed at any moment.

Frames on standard input and output: 4 bytes length (little endian), then msgpack.

    in   {functions: [[part, function], ...]}     once        out  {ready: true} | {error: reason}
    in   {prompt, response, columns}              each call   out  {started: true}, then for each part
                                                                   {value: float} | {error: reason}, up to the first error

User code never sees these pipes: its standard input is empty and what it prints goes to standard error.
"""

import os
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import msgpack

from asyncrl.errors import RewardError
from asyncrl.processes import die_with_parent
from asyncrl.rewards.load import bind, load_function

LENGTH = struct.Struct("<I")
MAX_REASON_CHARACTERS = 2000

Reward = Callable[[str, str, Mapping[str, Any]], float]


def pack_frame(message: Mapping[str, Any]) -> bytes:
    """Length and msgpack; values that msgpack does not know (dates, decimals, huge integers) become text."""
    body: bytes = msgpack.packb(message, default=str)
    return LENGTH.pack(len(body)) + body


def main() -> None:
    """Serve calls until standard input ends."""
    die_with_parent(int(sys.argv[1]))
    requests, replies = _take_over_pipes()
    serve(requests, replies)


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """The protocol of the module docstring."""
    own_pid = os.getpid()

    def reply(message: Mapping[str, Any]) -> None:
        if os.getpid() != own_pid:
            os._exit(0)  # a child that user code forked came back to us: it must not speak for the worker
        replies.write(pack_frame(message))
        replies.flush()

    rewards: list[Reward] = []
    for part, function in (_read_frame(requests) or {"functions": []})["functions"]:
        loaded = _attempt(_load, function)
        if isinstance(loaded, str):
            reply({"error": f"reward part `{part}` cannot be loaded: {loaded}"})
            return
        rewards.append(loaded)
    reply({"ready": True})
    while (call := _read_frame(requests)) is not None:
        reply({"started": True})
        for reward in rewards:
            value = _attempt(reward, call["prompt"], call["response"], call["columns"])
            reply({"error": value} if isinstance(value, str) else {"value": value})
            if isinstance(value, str):
                break


def _load(function: str) -> Reward:
    return bind(load_function(function))


def _attempt(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns, or why there is none as text. User code may raise whatever it likes, `SystemExit` too."""
    try:
        return work(*arguments)
    except RewardError as error:
        return str(error)[:MAX_REASON_CHARACTERS]
    except BaseException as error:  # noqa: BLE001 - it is reported to the parent, which fails the ticket with it
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"raised {type(error).__name__}: {error} ({where.filename}:{where.lineno})"[:MAX_REASON_CHARACTERS]


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Our own ends of the pipes; descriptors 0 and 1 are redirected for user code and its children."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _read_frame(requests: BinaryIO) -> dict[str, Any] | None:
    header = requests.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    body = requests.read(LENGTH.unpack(header)[0])
    message: dict[str, Any] = msgpack.unpackb(body)
    return message


if __name__ == "__main__":
    main()
