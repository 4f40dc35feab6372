"""Publishing: one copy of the weights into shared memory, from which all senders read the newest version.

`publish` runs in the training loop, the senders' bookkeeping in the control plane's thread. The lock between
them is never held during a copy or a transfer.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from asyncrl.errors import TransferError
from asyncrl.lineage import INITIAL, History
from asyncrl.weights.layout import Layout, checksum
from asyncrl.weights.sender_process import ForkServer, Published, SenderProcess
from asyncrl.weights.slots import Slot, Slots
from asyncrl.weights.transports import SenderSetup


class SharedMemoryPublisher:
    """Implements `weights.base.Publisher`.

    Args:
        layout: layout of the parameters that every `publish` gets.
        probe_ids: the fixed token sequence of the probe.
        directory: emptied and owned by this object, for rendezvous files and the disk transport's versions.
        deadline_s: bound on one transfer.
        interface: address of this host for generators on other hosts; None if all are on this host.
        history: history of the weights that are published.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        probe_ids: Sequence[int],
        directory: Path,
        deadline_s: float,
        interface: str | None = None,
        history: History = INITIAL,
    ) -> None:
        # An earlier learner may have left other weights under the same version numbers, in files that cannot
        # be removed while a process on another host has them open. So versions get a new directory.
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._setup = SenderSetup(
            layout=layout,
            workers=1,
            deadline_s=deadline_s,
            rendezvous_directory=str(directory / "rendezvous"),
            interface=interface,
            version_directory=str(directory / f"versions-{secrets.token_hex(4)}"),
        )
        self._layout = layout
        self._index = {spec.name: index for index, spec in enumerate(layout.specs)}
        self._probe_ids = tuple(probe_ids)
        self._history = str(history)
        self._directory = directory
        self._lock = threading.Lock()
        self._slots = Slots(layout.total_bytes)
        self._newest: Published | None = None
        self._fork_server = ForkServer()
        self._senders: list[SenderProcess] = []

    @property
    def one_host(self) -> bool:
        return self._setup.interface is None

    def publish(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], probe_logprobs: Sequence[float]
    ) -> float:
        """Raises TransferError if `tensors` are not those of the layout."""
        started_s = time.perf_counter()
        with self._lock:
            newest = self._newest.slot if self._newest else None
            slot = self._slots.writable(newest)
            if slot is newest:
                self._newest = None  # until the slot holds a whole version again
        published = Published(
            version=version,
            history=self._history,
            slot=slot,
            checksums=self._copy(slot, tensors),
            probe_ids=self._probe_ids,
            probe_logprobs=tuple(probe_logprobs),
        )
        with self._lock:
            self._newest = published
        return time.perf_counter() - started_s

    def open_sender(self, workers: int) -> SenderProcess:
        setup = replace(self._setup, workers=workers)
        sender = SenderProcess(setup, self._fork_server, take=self._take, give_back=self._give_back)
        with self._lock:
            self._senders = [*(each for each in self._senders if not each.is_closed), sender]
        return sender

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self._fork_server.close()
        self._slots.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _copy(self, slot: Slot, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, ...]:
        """Copy every tensor of the layout into the slot; returns their checksums."""
        sums: dict[int, int] = {}
        for name, tensor in tensors:
            index = self._index.get(name)
            if index is None or index in sums or tuple(tensor.shape) != self._layout.specs[index].shape:
                raise TransferError(
                    f"publish: tensor {name!r} {list(tensor.shape)} is unknown, repeated or of another "
                    "shape than the layout's"
                )
            self._layout.view(slot.buffer, index).copy_(tensor)
            sums[index] = checksum(slot.buffer, self._layout, index)
        if missing := [spec.name for index, spec in enumerate(self._layout.specs) if index not in sums]:
            raise TransferError(
                f"publish: {len(missing)} of {len(self._index)} tensors are missing, first {missing[0]!r}"
            )
        return tuple(sums[index] for index in range(len(self._layout.specs)))

    def _take(self) -> Published | None:
        with self._lock:
            if self._newest is not None:
                self._newest.slot.readers += 1
            return self._newest

    def _give_back(self, published: Published) -> None:
        with self._lock:
            published.slot.readers -= 1
