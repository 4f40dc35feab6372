"""Refuses to unpickle what arrives on a wire: a sender whose pickle is loaded can run any code here.

Checkpoints are pickles too, which are loaded after their manifest has been verified, and libraries unpickle
messages of their own children. So the module that asks for the unpickling decides whether it is refused.
"""

import sys
from types import FrameType
from typing import Any

from asyncrl.errors import WireError

# Modules that read messages of other hosts and processes.
WIRES = (
    "asyncrl",
    "msgpack",
    "redis",
    "zmq",
    "torch.distributed.distributed_c10d",
    "torch.distributed.rpc",
    "vllm.distributed.utils",
)
_MACHINERY = ("pickle", "_compat_pickle", "copyreg")


def refuse_pickles_from_wires() -> None:
    """Raise WireError in this process whenever a module in `WIRES` unpickles from now on."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "pickle.find_class":
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _MACHINERY:
        frame = frame.f_back
    origin = str(frame.f_globals.get("__name__")) if frame else ""  # the module that asked for it
    if any(origin == wire or origin.startswith(f"{wire}.") for wire in WIRES):
        asked = ".".join(map(str, arguments))
        raise WireError(f"{origin} met a pickle that asks for {asked}; a wire must not carry pickles")
