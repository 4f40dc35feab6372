"""Slots: the learner's memory or files for whole versions of the weights. Generators of its host load them.

    learner    slot = slots.begin(); write slot.buffer; slots.complete(published)
    generator  slot = open_slot(described, size); load slot.buffer; slot.require_unchanged()

A slot is in host memory, as an anonymous file that ends with its last process; in a file of a directory; or
on the learner's GPU, which other processes map through one CUDA IPC handle. Each has a stamp in its file: the
number of the publication that it holds, or 0 while it is written. A reader that still finds its stamp after
it has loaded has loaded one whole version, however slow it was.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import secrets
import shutil
import struct
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from torch import Tensor

from asyncrl.errors import ConfigError, TransferError
from asyncrl.weights.base import UpdateOrder
from asyncrl.weights.layout import Layout

log = logging.getLogger(__name__)

STAMP = struct.Struct("<Q")
_MADV_POPULATE_READ = 22  # Linux 5.14: maps all pages in one call, ten times as fast as one fault for each
# Two hold one version while the next is written; a GPU has no room for one slot per slow reader.
_MOST_ON_A_GPU = 2
# A generator usually reads two in turn. A file that is kept holds its memory, even if its learner has ended.
_MOST_KEPT = 2
# Positions of arguments of torch's `rebuild_cuda_tensor`: tensor class, storage class and dtype; device.
_CLASSES, _DEVICE = (0, 4, 5), 6
# Whether the reader waits for an event of the learner's GPU, which it may not see.
_WAITS = 14
_READ_ONLY = 8  # cudaHostRegisterReadOnly


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one version, and the number of its readers. Make it with `create`."""

    buffer: Tensor  # uint8, on the host or on a GPU
    stamp: int = 0
    readers: int = 0
    file: int = -1
    # Where other processes of this host open the file.
    _path: str = ""
    _stamp_at: int = 0
    _exported: list[Any] | None = None
    _is_memory: bool = False  # of the host, as a file without a name
    _is_prepared: bool = False

    @classmethod
    def create(cls, size_bytes: int, device: str = "cpu", directory: Path | None = None) -> Self:
        """Make a slot of zeros on "cpu" or "cuda", or in a new file of `directory`.

        On "cuda" the memory is allocated, elsewhere `prepare` does that. Raises OSError; ConfigError if no
        other process can map this GPU's memory.
        """
        if directory is None:
            file = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{file}"
        else:
            directory.mkdir(parents=True, mode=0o700, exist_ok=True)
            path = str(directory.absolute() / secrets.token_hex(8))
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if device == "cpu":
            os.ftruncate(file, size_bytes + STAMP.size)
            memory = mmap.mmap(file, size_bytes + STAMP.size)
            buffer = torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]
            return cls(buffer, file=file, _path=path, _stamp_at=size_bytes, _is_memory=directory is None)
        os.ftruncate(file, STAMP.size)
        with _mappable_memory():
            buffer = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        return cls(buffer, file=file, _path=path, _exported=_export(buffer))

    def prepare(self) -> None:
        """Allocate memory of the host or disk before the first write, which takes seconds.

        Raises OSError with what is needed and free; a write to mapped memory would end the process.
        """
        if self._exported is None and not self._is_prepared:
            needed_bytes = self._stamp_at + STAMP.size
            try:
                os.posix_fallocate(self.file, 0, needed_bytes)
            except OSError as error:
                place, free_bytes = "the memory of this host", psutil.virtual_memory().available
                if not self._is_memory:
                    place, free_bytes = self._path, shutil.disk_usage(self._path).free
                raise OSError(
                    error.errno,
                    f"a version of the weights needs {needed_bytes / 2**20:.1f} MiB of {place}, where "
                    f"{free_bytes / 2**20:.1f} MiB are free ({error.strerror}); make room there",
                ) from error
            if self._is_memory:
                register(self.buffer)
            self._is_prepared = True

    def begin(self) -> None:
        """Say that the content is about to change. Its readers will notice, and are no longer counted."""
        self.complete(0)
        self.readers = 0

    def complete(self, publication: int) -> None:
        """Say that the slot holds all of that publication; 0 is none."""
        self.stamp = publication
        os.pwrite(self.file, STAMP.pack(publication), self._stamp_at)

    def describe(self) -> dict[str, Any]:
        """Plain values with which `open_slot` finds the slot and what it holds now."""
        return {"path": self._path, "stamp": self.stamp, "exported": self._exported}

    def close(self) -> None:
        """Release this process's share; processes that have the slot open keep theirs."""
        os.close(self.file)


class Slots:
    """Slots of one size in one place, and the newest version in them.

    On a host there is at most one more than there are readers. On a GPU there are at most two; if both are
    read, the older one is taken from its readers.
    """

    def __init__(self, size_bytes: int, device: str = "cpu", directory: Path | None = None) -> None:
        """Slots of "cuda", of "cpu", or in files of `directory`. Raises ConfigError, see `Slot.create`."""
        self.newest: Published | None = None
        self._size_bytes, self._device, self._directory = size_bytes, device, directory
        # Both of a GPU at once, before the training divides its memory.
        count = _MOST_ON_A_GPU if device == "cuda" else 0
        self._slots = [Slot.create(size_bytes, device) for _ in range(count)]

    def begin(self) -> Slot:
        """A slot to write, without readers, the newest version's only if there is no other; else a new one,
        or the oldest. Raises OSError."""
        newest = self.newest.slot if self.newest else None
        free = [slot for slot in self._slots if not slot.readers]
        if not free and self._device == "cpu":
            free = [Slot.create(self._size_bytes, self._device, self._directory)]
            self._slots += free
        slot = min(free or self._slots, key=lambda slot: slot is newest)
        if slot is newest:
            self.newest = None  # until the slot holds a whole version again
        slot.begin()
        return slot

    def complete(self, published: "Published") -> None:
        """Say that its slot, which was begun, holds this version."""
        published.slot.complete(published.stamp)
        self.newest = published

    def file_of(self, stamp: int) -> int:
        """The open file of the slot that holds this publication; -1 if none does. Any thread may ask."""
        return next((slot.file for slot in self._slots if slot.stamp == stamp > 0), -1)

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """A version in its slot."""

    slot: Slot
    # The slot's while it holds this version.
    stamp: int
    layout: Layout
    checksums: tuple[int, ...]
    # An order without transport and details.
    template: UpdateOrder
    _orders: dict[str, UpdateOrder] = field(init=False, default_factory=dict)  # by transport

    def pin(self) -> Self:
        """Count one more reader of the slot."""
        self.slot.readers += 1
        return self

    def unpin(self) -> bool:
        """Count one reader less; False if the slot has been taken from its readers meanwhile."""
        is_there = self.slot.stamp == self.stamp
        self.slot.readers -= is_there
        return is_there

    def order(self, transport: str, **place: Any) -> UpdateOrder:
        """The order to receive this version over `transport` from `place`: one object for all readers."""
        if transport not in self._orders:
            details = {"layout": self.layout.to_plain(), "checksums": list(self.checksums), **place}
            self._orders[transport] = replace(self.template, transport=transport, details=details)
        return self._orders[transport]


@dataclass(slots=True, eq=False)
class OpenSlot:
    """A slot of another process. Writes to `buffer` must not happen, or stay private on the host."""

    buffer: Tensor
    _file: int
    _stamp_at: int
    _stamp: int

    def require_unchanged(self) -> None:
        """Raise TransferError unless the slot still holds what it was opened for."""
        if os.pread(self._file, STAMP.size, self._stamp_at) != STAMP.pack(self._stamp):
            raise TransferError(
                "weights: the learner wrote the next version over these while they were read; what was "
                "loaded must not be used, the next order brings the newest version"
            )

    def __del__(self) -> None:
        os.close(self._file)


def open_slot(
    described: Mapping[str, Any], size_bytes: int, *, device: int | None = None, keep: bool = False
) -> OpenSlot:
    """Map the slot that `Slot.describe` describes. `device` is the index of this process's GPU, if any.

    `keep` keeps memory of the host mapped for the slot's next versions; then nothing may write to `buffer`.
    Raises TransferError if the learner is gone, this process cannot see it or its GPU, or the slot holds
    another publication already.
    """
    path, stamp, exported = str(described["path"]), int(described["stamp"]), described["exported"]
    try:
        # It is a pipe, or anything, if the number of a process that has ended is used again.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        slot = OpenSlot(torch.empty(0), file, 0 if exported is not None else size_bytes, stamp)
        if exported is not None:
            slot.buffer = _import(exported, device)
        else:
            slot.buffer = _kept_buffer(file, size_bytes) if keep else _host_buffer(file, size_bytes)
        slot.require_unchanged()
    except (OSError, ValueError) as error:  # the latter if the file is shorter
        raise TransferError(
            f"weights: {path} cannot be opened ({error}): the learner has ended, or is in another container "
            "or of another user; set weights.transport=disk, or control.bind"
        ) from error
    return slot


def _host_buffer(file: int, size_bytes: int) -> Tensor:
    """The file's memory; what this process writes to it stays private."""
    memory = mmap.mmap(file, max(size_bytes, 1), access=mmap.ACCESS_COPY)
    with contextlib.suppress(OSError):  # an older kernel
        memory.madvise(_MADV_POPULATE_READ)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]


# The buffers of the files that were read last, by device, inode and size: to map all pages of a version takes
# longer than to copy it. A file lives as long as its buffer, so its inode is not used again meanwhile.
_kept: dict[tuple[int, int, int], Tensor] = {}


def _kept_buffer(file: int, size_bytes: int) -> Tensor:
    """The file's memory, mapped once for as long as the file is one of the `_MOST_KEPT` read last."""
    status = os.fstat(file)
    key = (status.st_dev, status.st_ino, size_bytes)
    buffer = _kept.pop(key, None)
    if buffer is None:
        buffer = _registered(file, size_bytes) if _uses_a_gpu() else _host_buffer(file, size_bytes)
    _kept[key] = buffer
    while len(_kept) > _MOST_KEPT:
        del _kept[next(iter(_kept))]
    return _kept[key]


def _registered(file: int, size_bytes: int) -> Tensor:
    """The file's memory for copies to a GPU; nothing can write to it. CUDA would copy private pages."""
    size_bytes = max(size_bytes, 1)
    # Not every system registers memory that was mapped for reading.
    with contextlib.suppress(OSError), open(f"/proc/self/fd/{file}", "r+b", buffering=0) as writable:
        buffer = torch.frombuffer(mmap.mmap(writable.fileno(), size_bytes), dtype=torch.uint8)
        if register(buffer):
            address, protect = ctypes.c_void_p(buffer.data_ptr()), ctypes.CDLL(None, use_errno=True).mprotect
            if protect(address, ctypes.c_size_t(buffer.nbytes), mmap.PROT_READ):
                raise OSError(ctypes.get_errno(), "mprotect")
            return buffer
    memory = mmap.mmap(file, size_bytes, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is read-only
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
    if not register(buffer, _READ_ONLY):
        log.warning("CUDA registers no memory of this host: weights are loaded several times as slowly")
    return buffer


def register(buffer: Tensor, flags: int = 0) -> bool:
    """Let the GPU copy between its memory and this memory of the host by itself, several times as fast.

    Returns whether it can. Without effect if this process uses no GPU, or if the system does not allow it.
    """
    if not _uses_a_gpu():
        return False
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, flags)) == 0:
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
        return True
    with contextlib.suppress(RuntimeError):  # otherwise the next kernel would report this error
        torch.zeros(1, device="cuda")
    return False


def _uses_a_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _mappable_memory() -> Iterator[None]:
    """Leave out torch's expandable segments: to map one, a process needs the right to debug this one."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = next((os.environ[name] for name in names if os.environ.get(name)), "")
    if "expandable_segments:true" not in settings.lower().replace(" ", ""):
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _export(buffer: Tensor) -> list[Any]:
    """The arguments of torch's `rebuild_cuda_tensor` as plain values. Raises ConfigError."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize()  # so that no reader has to wait for an event
    try:
        arguments = reduce_tensor(buffer)[1]  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # WSL2, some virtual GPUs, the allocator cudaMallocAsync
        raise ConfigError(
            f"weights.slots: no other process can map memory of this GPU ({error}); set weights.slots=host"
        ) from error
    exported = [
        None if position in _CLASSES else list(value) if isinstance(value, tuple) else value
        for position, value in enumerate(arguments)
    ]
    exported[_WAITS] = False
    return exported


def _import(exported: list[Any], device: int | None) -> Tensor:
    """The tensor of `_export`, mapped into this process's `device` for as long as it is used.

    A mapping that is kept would keep the memory of a learner that has ended from the next one.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = [tuple(value) if isinstance(value, list) else value for value in exported]
    for position, value in zip(_CLASSES, (Tensor, torch.storage.TypedStorage, torch.uint8), strict=True):
        arguments[position] = value
    arguments[_DEVICE] = device
    try:
        buffer: Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise TransferError(
            f"weights: the learner's GPU memory cannot be mapped ({error}): the GPUs of learner and "
            "generator need peer access; set weights.slots=host, or weights.transport=nccl"
        ) from error
    return buffer
