"""No pickle comes from a wire, and this process sees to it: who can make it unpickle can make it do anything.

Checkpoints are pickles too, and are loaded after their manifest has been verified; libraries unpickle what
their own children tell them. So what is refused is told by where the unpickling happens.
"""

import sys
from types import FrameType
from typing import Any

from asyncrl.errors import WireError

WIRES = (
    "asyncrl",
    "msgpack",
    "redis",
    "zmq",
    "torch.distributed.distributed_c10d",
    "torch.distributed.rpc",
    "vllm.distributed.utils",
)
"""Modules that read what other hosts and other processes send."""
_MACHINERY = ("pickle", "_compat_pickle", "copyreg")


def refuse_pickles_from_wires() -> None:
    """For as long as this process lives; an unpickling on a wire raises WireError."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "pickle.find_class":
        return
    origin = _origin(sys._getframe(1))
    if any(origin == wire or origin.startswith(f"{wire}.") for wire in WIRES):
        raise WireError(
            f"{origin} met a pickle that asks for {'.'.join(map(str, arguments))}; nothing on a wire may be "
            "one"
        )


def _origin(frame: FrameType | None) -> str:
    """The module that asked for the unpickling."""
    while frame is not None and frame.f_globals.get("__name__") in _MACHINERY:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")) if frame else ""
