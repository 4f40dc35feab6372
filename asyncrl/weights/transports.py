"""The transports of a sender process: Gloo here, NCCL in a module of its own."""

import secrets
import socket
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from asyncrl.weights import gloo
from asyncrl.weights.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One version for one generator."""

    # uint8; on the GPU for nccl, else in host memory.
    buffer: Tensor
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSetup:
    """The settings of a sender, which do not change."""

    layout: Layout
    # The generator's tensor-parallel workers. Only GPU transports send to each of them.
    workers: int
    deadline_s: float
    # Private to this sender; used if both ends are on one host.
    rendezvous_directory: str
    # Address that serves the rendezvous if there are generators on other hosts.
    interface: str | None


class Transport(Protocol):
    """One way to bring a version to a generator. Both methods raise TransferError."""

    def prepare(self, job: Job) -> dict[str, Any]:
        """Return the details of the update order, which the generator has not received yet."""
        ...

    def transfer(self, job: Job) -> None:
        """Send; meanwhile the generator receives the order."""
        ...


@dataclass(slots=True)
class GlooTransport:
    """One group, used until a transfer fails."""

    setup: SenderSetup
    _rendezvous: dict[str, Any] = field(default_factory=dict)
    _listener: socket.socket | None = None
    _group: gloo.Group | None = None

    def prepare(self, job: Job) -> dict[str, Any]:
        if self._group is None or self._group.spoilt:
            self._group = None
            self._rendezvous = {"name": secrets.token_hex(16)}
            if (host := self.setup.interface) is None:
                self._rendezvous["directory"] = self.setup.rendezvous_directory
            else:
                self._listener = socket.create_server((host, 0))
                self._rendezvous |= {"host": host, "port": self._listener.getsockname()[1]}
        return {
            "rendezvous": self._rendezvous,
            "layout": self.setup.layout.to_plain(),
            "checksums": list(job.checksums),
        }

    def transfer(self, job: Job) -> None:
        if self._group is None:
            self._group = gloo.open_group(
                self._rendezvous, rank=0, deadline_s=self.setup.deadline_s, listener=self._listener
            )
        gloo.send(self._group, job.buffer, self.setup.layout)
