"""What a sender process does for each transport: prepare (say how to receive), then transfer.

`prepare` returns the `details` of the update order. Gloo and disk are here; the GPU transports live in
modules of their own.
"""

import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from asyncrl.errors import TransferError
from asyncrl.weights import gloo
from asyncrl.weights.disk import write_version
from asyncrl.weights.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One version for one generator."""

    version: int
    buffer: Tensor
    """uint8, host memory."""
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSetup:
    """What stays the same in a sender's life."""

    layout: Layout
    workers: int
    """Of the generator; only GPU transports reach them all, the others reach the generator."""
    deadline_s: float
    rendezvous_directory: str
    """Private to this sender; both ends on one host."""
    interface: str | None
    """Address to serve rendezvous on instead, for generators on other hosts."""
    version_directory: str
    """Where the disk transport writes."""


class Transport(Protocol):
    """One way to bring a version to a generator. Raises TransferError."""

    def prepare(self, job: Job) -> dict[str, Any]:
        """Returns the details of the update order; the generator has not heard of it yet."""
        ...

    def transfer(self, job: Job) -> None:
        """Send; the generator is being told at this moment."""
        ...


@dataclass(slots=True)
class GlooTransport:
    """One group for as long as it works."""

    setup: SenderSetup
    _rendezvous: dict[str, Any] = field(default_factory=dict)
    _listener: socket.socket | None = None
    _group: gloo.Group | None = None

    def prepare(self, job: Job) -> dict[str, Any]:
        if self._group is None or self._group.spoilt:
            self._group = None
            self._rendezvous = self._new_rendezvous()
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

    def _new_rendezvous(self) -> dict[str, Any]:
        rendezvous: dict[str, Any] = {"name": secrets.token_hex(16)}
        if self.setup.interface is None:
            return {**rendezvous, "directory": self.setup.rendezvous_directory}
        self._listener = socket.create_server((self.setup.interface, 0))
        return {**rendezvous, "host": self.setup.interface, "port": self._listener.getsockname()[1]}


@dataclass(slots=True)
class DiskTransport:
    """Files: all the work is in the preparation, during which the generator samples on."""

    setup: SenderSetup

    def prepare(self, job: Job) -> dict[str, Any]:
        try:
            path = write_version(
                Path(self.setup.version_directory), job.version, job.buffer, self.setup.layout
            )
        except OSError as error:
            raise TransferError(
                f"weights on disk: version {job.version} could not be written: {error}; check the disk"
            ) from error
        return {"directory": str(path.absolute())}

    def transfer(self, job: Job) -> None:
        pass
