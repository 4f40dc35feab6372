"""A host for every role, and a cable between each pair: network namespaces joined by veth pairs, whose links
go down and up."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncrl.hosting.processes import die_with_parent

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of sched.h."""
_HERE = Path("/proc/thread-self/ns/net")


@dataclass(frozen=True, slots=True)
class Host:
    """A network of its own, as long as the process lives that holds it."""

    holder: int

    @property
    def namespace(self) -> Path:
        """A file that stands for its network."""
        return Path(f"/proc/{self.holder}/ns/net")

    def ip(self, *arguments: str) -> None:
        """The command of that name, on this host."""
        command = ["nsenter", f"--net={self.namespace}", "ip", *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=30)


@dataclass(frozen=True, slots=True)
class Cable:
    """Between two hosts, whose ends have addresses."""

    ends: tuple[Host, Host]
    number: int

    def lay(self) -> None:
        """Plug it in at both ends."""
        one, other = self.ends
        one.ip(
            "link", "add", self._name, "type", "veth", "peer", "name", self._name, "netns", str(other.holder)
        )
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
        context = multiprocessing.get_context("forkserver")
        self._holders = []
        for _ in range(3):
            ready, told = context.Pipe(duplex=False)
            holder = context.Process(target=_hold, args=(told,), daemon=True)
            holder.start()
            told.close()
            ready.recv()
            self._holders.append(holder)
        self.store, self.learner, self.generators = (Host(holder.pid or 0) for holder in self._holders)
        for host in (self.store, self.learner, self.generators):
            host.ip("link", "set", "lo", "up")  # as on every host: a store of torch connects to itself
        self.cables = {
            "generators": Cable((self.store, self.generators), 0),
            "learner": Cable((self.store, self.learner), 1),
            "control": Cable((self.learner, self.generators), 2),
        }
        for cable in self.cables.values():
            cable.lay()

    def close(self) -> None:
        """The networks end with their holders."""
        for holder in self._holders:
            holder.kill()
            holder.join(10.0)


def obstacle() -> str:
    """Why there can be no hosts here; empty when there can."""
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install iproute2 util-linux)"
    made = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "a0", "type", "veth", "peer", "name", "a1"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return f"no right to make networks: {made.stderr.strip()}" if made.returncode else ""


def _hold(ready: "multiprocessing.connection.Connection") -> None:
    die_with_parent()
    _checked(_LIBC.unshare(_NEW_NETWORK))
    ready.send(True)
    while True:
        signal.pause()


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
