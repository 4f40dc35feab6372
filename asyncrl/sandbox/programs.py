"""Runs a program that the model wrote, for code that is not on an asyncio loop: rewards and tools."""

import asyncio
import atexit
import os

from asyncrl.sandbox.box import Box, Result

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
