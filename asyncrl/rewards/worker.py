"""One reward process: `python -m asyncrl.rewards.worker PARENT_PID`. Runs user code, so it may be killed at
any moment.

Messages on standard input and output, as in `asyncrl.workers`:

    in   {functions: [[part, function], ...],     once        out  {ready: true} | {error: reason}
          limits: {RLIMIT_ name: value}, sandboxed}
    in   {prompt, response, columns}              each call   out  {started: true}, then for each part
                                                                   {value: float, answer: text or nil} |
                                                                   {error: reason}, up to the first error;
                                                                   with {spent: true} where it wants to be
                                                                   replaced

User code never sees these pipes: its standard input is empty and what it prints goes to standard error.
"""

import contextlib
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import msgpack

from asyncrl.errors import RewardError
from asyncrl.plugins import described
from asyncrl.processes import close_to_others, die_with_parent
from asyncrl.rewards.functions import bind, load_function
from asyncrl.workers import pack, receive

MAX_REASON_CHARACTERS = 2000
# Process id of a worker in a sandbox, and of no other worker.
SANDBOXED_PID = 1
SCRATCH = ("/tmp", "/dev/shm")

Reward = Callable[[str, str, Mapping[str, Any]], tuple[float, str | None]]


def main() -> None:
    """Serve calls until standard input ends."""
    die_with_parent(int(sys.argv[1]))
    requests, replies = _take_over_pipes()
    serve(requests, replies)


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """The protocol of the module docstring, until there are no more requests."""
    with contextlib.suppress(EOFError):
        _serve(requests, replies)


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    own_pid = os.getpid()

    def reply(message: Mapping[str, Any]) -> None:
        if os.getpid() != own_pid:
            os._exit(0)  # a child that user code forked came back to us: it must not speak for the worker
        replies.write(pack(message, default=str))  # dates, decimals and huge integers become text
        replies.flush()

    rewards: list[Reward] = []
    orders = msgpack.unpackb(receive(requests))
    is_alone = orders.get("sandboxed", False) and own_pid == SANDBOXED_PID
    _restrict(orders.get("limits", {}), is_alone=is_alone)
    for part, function in orders["functions"]:
        loaded = _attempt(_load, function)
        if isinstance(loaded, str):
            reply({"error": f"reward part `{part}` cannot be loaded: {loaded}"})
            return
        rewards.append(loaded)
    reply({"ready": True})
    while True:
        call = msgpack.unpackb(receive(requests))
        reply({"started": True})
        for reward in rewards:
            judged = _attempt(reward, call["prompt"], call["response"], call["columns"])
            message = (
                {"error": judged} if isinstance(judged, str) else {"value": judged[0], "answer": judged[1]}
            )
            reply(message | (_tidied() if is_alone else {}))
            if isinstance(judged, str):
                break


def _restrict(limits: Mapping[str, int], *, is_alone: bool) -> None:
    """Set soft and hard limits, unless they are lower already. In a sandbox, close our pipes to what rewards
    start."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lowest, lowest))
    if is_alone:
        close_to_others()


def _tidied() -> dict[str, bool]:
    """In a sandbox: end everything that a call started, and report whether the next call needs a new
    sandbox."""
    if os.getpid() != SANDBOXED_PID:  # a child that user code forked came back to us
        return {}
    _end_everybody()
    return {"spent": True} if _is_spent() else {}


def _end_everybody() -> None:
    """Kill every process that a reward left running. Only in a sandbox: -1 means every process that we can
    see."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):  # nobody, or nobody left
        return


def _is_spent() -> bool:
    """Whether earlier calls have used up half of the space for files, or half of the descriptors."""
    usages = [shutil.disk_usage(place) for place in SCRATCH]
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        any(usage.used > usage.total / 2 for usage in usages)
        or 2 * len(os.listdir("/proc/self/fd")) > descriptors
    )


def _load(function: str) -> Reward:
    return bind(load_function(function))


def _attempt(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns, or why there is none as text. User code may raise whatever it likes, `SystemExit`
    too."""
    try:
        return work(*arguments)
    except RewardError as error:
        return str(error)[:MAX_REASON_CHARACTERS]
    except BaseException as error:  # noqa: BLE001 - it is reported to the parent, which fails the ticket with it
        return f"raised {described(error)}"[:MAX_REASON_CHARACTERS]


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Our own ends of the pipes; descriptors 0 and 1 are redirected for user code and its children."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what is printed is told with what went wrong after it
    return requests, replies


if __name__ == "__main__":
    main()
