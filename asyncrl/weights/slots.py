"""Shared memory for whole versions of the weights: anonymous files, gone with their last process.

Other processes open a slot as /proc/<owner>/fd/<n>, so a killed process leaves no file behind. `Slots`, in
the learner, chooses slots; its caller holds a lock.
"""

import mmap
import os
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one version, and the number of senders that read it. Make it with `create`."""

    fd: int
    buffer: Tensor  # uint8
    readers: int = 0
    # The path at which other processes open the slot.
    path: str = field(init=False)

    def __post_init__(self) -> None:
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"

    @classmethod
    def create(cls, size_bytes: int) -> Self:
        """Allocate a slot in this process."""
        fd = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(size_bytes, 1))
        return cls(fd, _as_tensor(mmap.mmap(fd, max(size_bytes, 1)), size_bytes))

    def close(self) -> None:
        """Release this process's share; processes that have the slot open keep theirs."""
        os.close(self.fd)


class Slots:
    """Slots of one size. There is at most one more than there are readers."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._slots: list[Slot] = []

    def __len__(self) -> int:
        return len(self._slots)

    def writable(self, newest: Slot | None) -> Slot:
        """A slot without readers, `newest` only if there is no other; a new slot if all have readers."""
        free = [slot for slot in self._slots if not slot.readers]
        if not free:
            free = [Slot.create(self._size_bytes)]
            self._slots += free
        return min(free, key=lambda slot: slot is newest)

    def close(self) -> None:
        """Release all slots."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()


def open_slot(path: str, size_bytes: int) -> Tensor:
    """The bytes of another process's slot; writes to them stay private to this process."""
    with open(path, "rb") as file:
        return _as_tensor(mmap.mmap(file.fileno(), max(size_bytes, 1), access=mmap.ACCESS_COPY), size_bytes)


def _as_tensor(memory: mmap.mmap, size_bytes: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]
