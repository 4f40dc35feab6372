"""Shared memory for whole versions of the weights, in anonymous files that end with their last process.

Other processes open a slot as /proc/<owner>/fd/<n>, so a killed process leaves no file behind.
"""

import mmap
import os
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one version (uint8), and the number of senders that read it. `create` makes one."""

    fd: int
    buffer: Tensor
    readers: int = 0

    @property
    def path(self) -> str:
        """The path at which other processes open the slot."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @classmethod
    def create(cls, size_bytes: int) -> Self:
        """Allocate a slot in this process."""
        fd = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(size_bytes, 1))
        return cls(fd, _as_tensor(mmap.mmap(fd, max(size_bytes, 1)), size_bytes))

    def close(self) -> None:
        """Release this process's reference; other processes that have the slot open keep theirs."""
        os.close(self.fd)


class Slots:
    """The learner's slots, all of one size: at most one more than readers. The caller holds a lock."""

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
        for slot in self._slots:
            slot.close()
        self._slots.clear()


def open_slot(path: str, size_bytes: int) -> Tensor:
    """The bytes of another process's slot; writes to them stay private to this process."""
    with open(path, "rb") as file:
        return _as_tensor(mmap.mmap(file.fileno(), max(size_bytes, 1), access=mmap.ACCESS_COPY), size_bytes)


def _as_tensor(memory: mmap.mmap, size_bytes: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]
