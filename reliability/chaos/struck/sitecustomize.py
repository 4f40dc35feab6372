"""On PYTHONPATH, a process of a run kills itself where the file STRIKE_IN says: `module:function:start` or `:end`.

Python itself imports this module when it begins. The process that renames the file first is the one that
dies; the name is then STRIKE_IN.struck.
"""

import functools
import importlib.machinery
import inspect
import os
import signal
import sys
from typing import Any

FILE = os.environ.get("STRIKE_IN", "")
# What the campaign strikes at: module, and functions of it.
WATCHED = {
    "asyncrl.weights.publisher": ["SlotPublisher.publish", "SlotPublisher._finish", "SlotPublisher.order"],
    "asyncrl.weights.staging": ["HostStaging.stage"],
    "asyncrl.engine.vllm.engine": [
        "VLLMEngine.begin_update",
        "VLLMEngine.receive",
        "VLLMEngine.finish_update",
    ],
    "asyncrl.engine.vllm.receiver": ["_load_adapter"],
    "asyncrl.engine.vllm.adapter": ["Adapter.replace"],
    "asyncrl.weights.slots": ["open_slot"],
    "asyncrl.weights.agreement": ["Agreement.judge"],
}


def strike(place):
    try:
        with open(FILE) as file:
            if file.read() != place:
                return
        os.rename(FILE, f"{FILE}.struck")
    except FileNotFoundError:  # nothing is to be struck, or another process was first
        return
    os.kill(os.getpid(), signal.SIGKILL)


def watched(function, place):
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waiting(*arguments, **options):
            strike(f"{place}:start")
            result = await function(*arguments, **options)
            strike(f"{place}:end")
            return result

        return waiting

    @functools.wraps(function)
    def calling(*arguments, **options):
        strike(f"{place}:start")
        result = function(*arguments, **options)
        strike(f"{place}:end")
        return result

    return calling


class Finder:
    """Finds the watched modules as Python would, and replaces their functions when they are there."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        run = loader.exec_module

        def run_and_replace(module):
            run(module)
            for function in WATCHED[name]:
                owner, _, last = function.rpartition(".")
                holder = getattr(module, owner) if owner else module
                setattr(holder, last, watched(getattr(holder, last), f"{name}:{function}"))

        loader.exec_module = run_and_replace
        return spec


if FILE:
    sys.meta_path.insert(0, Finder)
