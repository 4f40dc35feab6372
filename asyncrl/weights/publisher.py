"""Publishing: one copy of the weights into a slot, from which generators get the newest version.

    training loop       publish: copy the parameters into a slot, usually on the device where they are
    publisher's thread  the slot's checksums; then the version is the newest and is announced
    another thread      copies of the newest version, in host memory or in a file, if a transport needs them
    server's thread     sends slots to generators of other hosts, or has processes send them
    control plane       order, release: the newest version is pinned for each reader

The lock is held for bookkeeping only, never during a copy or a transfer.
"""

import itertools
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from asyncrl.config.addresses import host_of
from asyncrl.config.schema import Config
from asyncrl.errors import TransferError
from asyncrl.lineage import INITIAL, History
from asyncrl.weights.base import EVERY_ROW, TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout, checksums
from asyncrl.weights.nccl import SENDS, start
from asyncrl.weights.slots import Published, Slot, Slots
from asyncrl.weights.stream import SlotServer

# For a copy under way when the run ends; a disk that hangs longer is left to the end of the process.
_COPY_S = 10.0
_LOOPBACK = "127.0.0.1"


class SlotPublisher:
    """Implements `weights.base.Publisher`.

    Args:
        layout: layout of the parameters that every `publish` gets.
        device: "cpu" or "cuda", where versions are published. Parameters on a GPU may have their versions in
            memory of the host; then the training loop waits for a copy to the host.
        probe_ids, initial_logprobs, deadline_s, target: see `UpdateOrder`.
        directory: emptied and owned by this object, for the versions of the disk transport.
        interface: address of this host for generators on other hosts, which fetch weights from a port of it;
            None if all are on this host.
        history: history of the weights that are published.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        device: str = "cpu",
        probe_ids: Sequence[Sequence[int]],
        initial_logprobs: Sequence[float],
        directory: Path,
        deadline_s: float,
        interface: str | None = None,
        history: History = INITIAL,
        target: str = "weights",
    ) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._layout = layout
        self._index = {spec.name: index for index, spec in enumerate(layout.specs)}
        self._template = UpdateOrder(
            version=-1,
            transport="",
            deadline_s=deadline_s,
            details={},
            probe_ids=tuple(map(tuple, probe_ids)),
            probe_logprobs=(),
            initial_logprobs=tuple(initial_logprobs),
            history=str(history),
            target=target,
            size_bytes=layout.total_bytes,
        )
        self._directory = directory
        self._lock = threading.Lock()
        self._slots = Slots(layout.total_bytes, device)
        self._on_host = self._slots if device == "cpu" else Slots(layout.total_bytes)
        self._places = {
            "slot": self._slots,
            "nccl": self._slots,
            "tcp": self._on_host,
            "disk": Slots(layout.total_bytes, directory=directory / "versions"),
        }
        # In the training loop's own stream, its kernels would wait for a copy to the host.
        self._for_sums, self._for_copies = (
            torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._stamps = itertools.count(1)
        self._thread = ThreadPoolExecutor(1, "publish")
        self._published: Future[int] = Future()
        self._published.set_result(-1)
        self._copying: threading.Thread | None = None
        self._late_at_s = 0.0  # when the copy under way counts as hung
        self._not_copied: OSError | RuntimeError | None = None
        # What each reader has pinned; or the version that it waits for, while a copy of it is made.
        self._readers: dict[str, Published | int] = {}
        self._over_nccl: set[str] = set()  # generators; a reader is `id:incarnation`
        self._interface = interface
        # Connections need no open address if they come from this host.
        self._server = None if interface is None else self._serve(interface)

    @property
    def one_host(self) -> bool:
        return self._interface is None

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        probe_logprobs: Sequence[float],
        skipped: Mapping[str, bytes] = EVERY_ROW,
    ) -> Future[int]:
        """Raises TransferError if `tensors` are not those of the layout."""
        self._published.result()  # its slot could be taken; the checksums of a version take milliseconds
        with self._lock:
            slot = self._slots.begin()
        slot.prepare()
        missing = dict(self._index)
        for name, tensor in tensors:
            index = missing.pop(name, None)
            if index is None or tuple(tensor.shape) != self._layout.specs[index].shape:
                raise TransferError(
                    f"publish: tensor {name!r} {list(tensor.shape)} is unknown, repeated or of another "
                    "shape than the layout's"
                )
            self._layout.view(slot.buffer, index).copy_(tensor)
        if missing:
            raise TransferError(
                f"publish: {len(missing)} of {len(self._index)} tensors are missing, first "
                f"{next(iter(missing))!r}"
            )
        copied = None
        if slot.buffer.is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        order = replace(
            self._template, version=version, probe_logprobs=tuple(probe_logprobs), skipped=skipped
        )
        self._published = self._thread.submit(self._finish, slot, order, copied)
        return self._published

    def check(self) -> None:
        if self._published.done():
            self._published.result()

    def order(self, reader: str, transport: str) -> UpdateOrder | None:
        waits_for = self._unpin(reader)
        found = self._readers[reader] = self._take(transport, waits_for)
        if isinstance(found, int):
            return None
        slot = found.slot.describe()
        if transport not in ("tcp", "nccl"):
            return found.order(transport, slot=slot)
        if self._server is None:
            if transport == "tcp":
                raise OSError("the learner listens on no address; set control.bind")
            self._server = self._serve(_LOOPBACK)
        source = self._server.source(found.stamp)
        if transport == "nccl":
            source["slot"] = slot
            self._over_nccl.add(reader.partition(":")[0])
            self._server.most_handed = len(self._over_nccl)
        return found.order(transport, source=source)

    def release(self, reader: str) -> None:
        self._unpin(reader)

    def close(self) -> None:
        if self._server:
            self._server.close()
        self._thread.shutdown()
        if self._copying:
            self._copying.join(_COPY_S)
            if self._copying.is_alive():  # it needs the slots until this process ends
                return
        for slots in set(self._places.values()):
            slots.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _finish(self, slot: Slot, order: UpdateOrder, copied: torch.cuda.Event | None) -> int:
        """Make the copied version the newest one; runs in the publisher's thread."""
        if copied:
            copied.synchronize()
        with torch.cuda.stream(self._for_sums):
            sums = checksums(slot.buffer, self._layout)
        with self._lock:
            self._slots.complete(Published(slot, next(self._stamps), self._layout, sums, order))
        return order.version

    def _take(self, transport: str, wanted: int) -> Published | int:
        """Pin version `wanted` or a newer one for a transport; if it is being copied, return what to ask for.

        A `wanted` of -1 stands for the newest version. A copy may be older than that when it is ready, but
        not older than what was the newest when it was asked for first. Raises OSError or RuntimeError if the
        version could not be copied, or is not copied after `deadline_s`; the next call tries again.
        """
        place = self._places[transport]
        with self._lock:
            if (newest := self._slots.newest) is None:
                return wanted
            wanted = newest.template.version if wanted < 0 else wanted
            if place.newest and place.newest.template.version >= wanted:
                return place.newest.pin()
            if self._not_copied:
                error, self._not_copied = self._not_copied, None
                raise error
            if self._copying and self._copying.is_alive():
                if time.monotonic() > self._late_at_s:
                    raise OSError(
                        f"a copy of the weights takes more than {self._template.deadline_s:g} s "
                        f"(weights.deadline_s): if the disk of {self._directory} hangs, mend it, or set "
                        "another weights.transport"
                    )
            else:
                # A daemon: a disk that hangs must not keep this process from ending.
                copying = threading.Thread(target=self._copy, args=(newest, place), daemon=True)
                copying.start()  # it waits for the lock
                self._copying, self._late_at_s = copying, time.monotonic() + self._template.deadline_s
                newest.pin()
            return wanted

    def _copy(self, newest: Published, place: Slots) -> None:
        """Copy a pinned version to another place, in a thread of its own."""
        try:
            with self._lock:
                slot = place.begin()
            slot.prepare()
            with torch.cuda.stream(self._for_copies):
                slot.buffer.copy_(newest.slot.buffer)
            sums = checksums(slot.buffer, self._layout) if newest.slot.buffer.is_cuda else newest.checksums
        except (OSError, RuntimeError) as error:
            with self._lock:
                newest.unpin()
                self._not_copied = error
            return
        copy = replace(newest, slot=slot, stamp=next(self._stamps), checksums=sums)
        with self._lock:
            if newest.unpin():  # otherwise the next version was written over it during the copy
                place.complete(copy)

    def _unpin(self, reader: str) -> int:
        """Unpin what the reader has; returns the version that it waits for, or -1."""
        held = self._readers.pop(reader, -1)
        if isinstance(held, int):
            return held
        with self._lock:
            held.unpin()
        return -1

    def _serve(self, host: str) -> SlotServer:
        return SlotServer(
            host,
            self._on_host.file_of,
            self._layout.total_bytes,
            deadline_s=self._template.deadline_s,
            start=partial(start, SENDS),
        )


def open_publisher(
    config: Config,
    specs: Sequence[TensorSpec],
    *,
    device: str,
    probe_ids: Sequence[Sequence[int]],
    initial_logprobs: Sequence[float],
    directory: Path,
    history: History,
) -> SlotPublisher:
    """Open the publisher of parameters with these `specs`, which are on `device`. See `SlotPublisher`."""
    return SlotPublisher(
        Layout.plan(specs, config.weights.bucket_mib << 20),
        device="cpu" if config.weights.slots == "host" else device,
        probe_ids=probe_ids,
        initial_logprobs=initial_logprobs,
        directory=directory,
        deadline_s=config.weights.deadline_s,
        interface=config.control.bind and host_of(config.control.bind),
        history=history,
        target=config.model.update_target,
    )
