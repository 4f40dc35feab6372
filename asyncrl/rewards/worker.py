"""One reward process: `python -m asyncrl.rewards.worker PARENT_PID`. It runs user code and may be killed.

Messages on standard input and output, framed as in `asyncrl.hosting.workers`:

    in   {functions: [[part, function, params], ...], limits: {RLIMIT_ name: value}, sandboxed}     once
    out  {ready: true, raw: parts that take `raw_response`, chat: parts whose form `takes_chat`,
          most: {part: `Form.most`}} | {error: reason}
    in   {part, prompts, responses, columns: those of each response,
          apart: the names of those that differ within a group}                                 each call
    out  {started: true}, then {values: [float, ...], answers: [text or nil, ...]} | {error: reason}, with
         {spent: true} to be replaced; a function that abstains has the value NaN

User code never sees these pipes: its standard input is empty, and its output goes to standard error.
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

from asyncrl.errors import RewardError, as_unicode
from asyncrl.hosting.processes import close_to_others, die_with_parent, join_outputs, restrict
from asyncrl.hosting.workers import pack, receive
from asyncrl.plugins import described
from asyncrl.rewards.forms import Form, Reward, bind, form_for, load_function
from asyncrl.sandbox.bubblewrap import SCRATCH

MAX_REASON_CHARACTERS = 2000
REPLY = ("values", "answers")
# Process id of a worker in a sandbox, and of no other worker.
SANDBOXED_PID = 1


def main() -> None:
    """Serve calls until standard input ends."""
    die_with_parent(int(sys.argv[1]))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # User code and its children get other descriptors 0 and 1.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    join_outputs()
    serve(requests, replies)


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Follow the protocol of the module's docstring until there are no more requests."""
    own_pid = os.getpid()

    def reply(message: Mapping[str, Any]) -> None:
        if os.getpid() != own_pid:
            os._exit(0)  # a child that user code forked returned to this loop: it must not reply
        replies.write(pack(message, default=str))  # dates, decimals and huge integers become text
        replies.flush()

    with contextlib.suppress(EOFError):
        rewards: dict[str, Reward] = {}
        forms: dict[str, Form] = {}
        orders = msgpack.unpackb(receive(requests), ext_hook=lambda code, digits: int(digits))
        is_alone = orders.get("sandboxed", False) and own_pid == SANDBOXED_PID
        restrict(orders.get("limits", {}))
        if is_alone:
            close_to_others()
        for part, function, params in orders["functions"]:
            loaded = _attempt(_load, function, params)
            if isinstance(loaded, str):
                reply({"error": f"reward part `{part}` cannot be loaded: {loaded}"})
                return
            rewards[part], forms[part] = loaded
        raw = [part for part, form in forms.items() if form.takes("raw_response")]
        chat = [part for part, form in forms.items() if form.takes_chat]
        most = {part: form.most for part, form in forms.items()}
        reply({"ready": True, "raw": raw, "chat": chat, "most": most})
        while True:
            call = msgpack.unpackb(receive(requests), ext_hook=lambda code, digits: int(digits))
            reply({"started": True})
            given = (call[name] for name in ("prompts", "responses", "columns", "apart"))
            judged = _attempt(rewards[call["part"]], *given)
            failed = isinstance(judged, str)
            found = {"error": judged} if failed else dict(zip(REPLY, zip(*judged, strict=True), strict=True))
            reply(found | _tidied(is_alone))


def _tidied(is_alone: bool) -> dict[str, bool]:
    """Report whether half of the descriptors is used; in a sandbox, tidy it, and look at its files, too."""
    is_full = False
    if is_alone:
        if os.getpid() != SANDBOXED_PID:  # a child that user code forked returned to the loop
            return {}
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # there is none, or none is left
            os.kill(-1, signal.SIGKILL)  # all processes of the sandbox
            while True:
                os.waitpid(-1, 0)
        for place in SCRATCH:
            os.chmod(place, 0o755)  # what ran may have taken our rights to read and write there
        usages = [shutil.disk_usage(place) for place in SCRATCH]
        is_full = any(usage.used > usage.total / 2 for usage in usages)
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        is_full |= 0 < descriptors < 2 * len(os.listdir("/proc/self/fd"))
    except OSError:  # none is left to look with
        is_full = True
    return {"spent": True} if is_full else {}


def _load(name: str, params: Mapping[str, Any]) -> tuple[Reward, Form]:
    function = load_function(name, params)
    return bind(function, params), form_for(function).with_params(params)


def _attempt(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work`, or the reason why it failed, as text. User code may raise even `SystemExit`."""
    try:
        return work(*arguments)
    except RewardError as error:
        return as_unicode(str(error)[:MAX_REASON_CHARACTERS])
    except BaseException as error:  # noqa: BLE001 - reported to the parent, which fails the ticket
        return as_unicode(f"raised {described(error)}"[:MAX_REASON_CHARACTERS])


if __name__ == "__main__":
    main()
