"""A host for every role, and a cable between each pair: network namespaces joined by veth pairs, whose links
go down and up."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncrl.cluster.local import Namespace

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of sched.h."""
_HERE = Path("/proc/thread-self/ns/net")


@dataclass(frozen=True, slots=True)
class Cable:
    """Between two hosts, whose ends have addresses."""

    ends: tuple[Namespace, Namespace]
    number: int

    def lay(self) -> None:
        """Plug it in at both ends."""
        one, other = self.ends
        there = str(other.holder.pid)
        one.ip("link", "add", self._name, "type", "veth", "peer", "name", self._name, "netns", there)
        for end, host in enumerate(self.ends):
            host.ip("address", "add", f"{self.address(end)}/30", "dev", self._name)
            host.ip("link", "set", self._name, "up")

    def address(self, end: int) -> str:
        """Of the first (0) or the second host (1)."""
        return f"10.77.{self.number}.{end + 1}"

    def cut(self) -> None:
        """Pull it out at the first host: nothing passes, and both see that the link is down."""
        self.ends[0].ip("link", "set", self._name, "down")

    def heal(self) -> None:
        """Plug it in again."""
        self.ends[0].ip("link", "set", self._name, "up")

    @property
    def _name(self) -> str:
        return f"cable{self.number}"


class Hosts:
    """Hosts of store, learner and generators, and cables by the names of the proxies that they replace."""

    def __init__(self) -> None:
        self.store, self.learner, self.generators = (Namespace.begin() for _ in range(3))
        self.cables = {
            "generators": Cable((self.store, self.generators), 0),
            "learner": Cable((self.store, self.learner), 1),
            "control": Cable((self.learner, self.generators), 2),
        }
        for cable in self.cables.values():
            cable.lay()

    def close(self) -> None:
        """The networks end with their holders."""
        for host in (self.store, self.learner, self.generators):
            host.close()


def move_to(namespace: Path) -> None:
    """This thread, and all that it starts, into another network."""
    file = os.open(namespace, os.O_RDONLY)
    try:
        _checked(_LIBC.setns(file, _NEW_NETWORK))
    finally:
        os.close(file)


@contextmanager
def inside(namespace: Path) -> Iterator[None]:
    """This thread is in another network for a while."""
    before = os.open(_HERE, os.O_RDONLY)
    move_to(namespace)
    try:
        yield
    finally:
        _checked(_LIBC.setns(before, _NEW_NETWORK))
        os.close(before)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
