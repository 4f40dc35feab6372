"""Shared memory for whole versions of the weights: anonymous files that vanish with the last process that has them.

Other processes open a slot as /proc/<owner>/fd/<n>, so there is no name to leak and nothing to clean up after kill -9.
`Slots` only keeps the books, in the learner; its owner holds a lock around it.
"""

import mmap
import os
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one version and how many senders read it. Make it with `create`."""

    fd: int
    # uint8.
    buffer: Tensor
    readers: int = 0
    # Where other processes open it.
    path: str = field(init=False)

    def __post_init__(self) -> None:
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"

    @classmethod
    def create(cls, size_bytes: int) -> Self:
        """New memory of this process."""
        fd = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(size_bytes, 1))
        return cls(fd, _as_tensor(mmap.mmap(fd, max(size_bytes, 1)), size_bytes))

    def close(self) -> None:
        """Give it up; what others still have open goes with them."""
        os.close(self.fd)


class Slots:
    """Slots of one size. At most one more than there are readers is ever made."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._slots: list[Slot] = []

    def __len__(self) -> int:
        return len(self._slots)

    def writable(self, newest: Slot | None) -> Slot:
        """A slot that nobody reads, `newest` only if there is no other; a new one when all are read."""
        free = [slot for slot in self._slots if not slot.readers]
        free.sort(key=lambda slot: slot is newest)
        return free[0] if free else self._grow()

    def close(self) -> None:
        """Give up all of them."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _grow(self) -> Slot:
        self._slots.append(Slot.create(self._size_bytes))
        return self._slots[-1]


def open_slot(path: str, size_bytes: int) -> Tensor:
    """A slot's bytes in another process: writes to them stay private to it."""
    with open(path, "rb") as file:
        return _as_tensor(mmap.mmap(file.fileno(), max(size_bytes, 1), access=mmap.ACCESS_COPY), size_bytes)


def _as_tensor(memory: mmap.mmap, size_bytes: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]
