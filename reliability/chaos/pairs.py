"""The pairs of processes that carry weights over NCCL, and how a strike at one of their ends goes on."""

import contextlib
from collections.abc import Callable

import psutil

Pair = dict[str, psutil.Process]
"""`sends` is the learner's end, `receives` the generator's."""

ENDINGS: dict[str, Callable[[Pair, str], None]] = {
    "killed": lambda pair, end: pair[end].kill(),
    "stopped, the other killed": lambda pair, end: pair["receives" if end == "sends" else "sends"].kill(),
    "stopped until the deadline": lambda pair, end: None,
    "stopped and continued": lambda pair, end: pair[end].resume(),
}
"""What becomes of a pair of which one end was stopped."""


def ends_of(pid: int) -> list[psutil.Process]:
    """The ends of pairs that a process has started."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "asyncrl.weights.nccl" in process.cmdline():
                    found.append(process)
    return found


def pairs_of(learner: int, generator: int) -> list[Pair]:
    """The pair between two processes, once its ends are connected."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for receives in ends_of(generator):
            ports = {each.laddr.port for each in receives.net_connections("tcp")}
            found += [
                {"sends": sends, "receives": receives}
                for sends in ends_of(learner)
                if any(each.raddr and each.raddr.port in ports for each in sends.net_connections("tcp"))
            ]
    return found
