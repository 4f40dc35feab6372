"""The transports of a sender process: Gloo and disk here, the GPU transports in modules of their own."""

import os
import secrets
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file
from torch import Tensor

from asyncrl.errors import TransferError
from asyncrl.weights import gloo
from asyncrl.weights.layout import Layout

_KEPT_VERSIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One version for one generator."""

    version: int
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
    # Where the disk transport writes.
    version_directory: str


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


@dataclass(slots=True)
class DiskTransport:
    """Safetensors files, one per bucket, with Hugging Face names. They need no connection, but are slower.

        <version_directory>/v<version>/model-00001-of-00002.safetensors ...

    Several senders may write the same version concurrently; complete files of a killed one are not written
    again. The directory gets its final name when all files are complete. The newest two versions are kept.
    """

    setup: SenderSetup

    def prepare(self, job: Job) -> dict[str, Any]:
        """Do all the work here, while the generator still samples."""
        try:
            path = self._write(job)
        except OSError as error:
            raise TransferError(
                f"weights on disk: version {job.version} could not be written: {error}; check the disk"
            ) from error
        return {
            "directory": str(path.absolute()),
            "names": [spec.name for spec in self.setup.layout.specs],
            "checksums": list(job.checksums),
        }

    def transfer(self, job: Job) -> None:
        pass

    def _write(self, job: Job) -> Path:
        root, layout = Path(self.setup.version_directory), self.setup.layout
        final, partial = root / f"v{job.version}", root / f"partial-v{job.version}"
        if not final.is_dir():
            partial.mkdir(parents=True, exist_ok=True)
            try:
                for position, bucket in enumerate(layout.buckets, start=1):
                    path = partial / f"model-{position:05d}-of-{len(layout.buckets):05d}.safetensors"
                    if not path.exists():
                        tensors = range(bucket.first, bucket.end)
                        named = {
                            layout.specs[index].name: layout.view(job.buffer, index) for index in tensors
                        }
                        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
                        save_file(named, unfinished)
                        os.rename(unfinished, path)
                os.rename(partial, final)
            except OSError:
                # Another sender may have completed and renamed the same directory meanwhile.
                if not final.is_dir():
                    raise
        versions = {directory: int(directory.name.rpartition("v")[2]) for directory in root.iterdir()}
        for directory in sorted(versions, key=lambda each: versions[each])[:-_KEPT_VERSIONS]:
            shutil.rmtree(directory, ignore_errors=True)  # another sender may be deleting it too
        return final
