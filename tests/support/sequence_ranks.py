"""Ranks that divide sequences, without processes."""

import threading

import torch
from torch import Tensor

from asyncrl.trainer.sequence_parallel import SequenceRanks


class Threads:
    """Where the threads exchange parts."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.parts: dict[int, Tensor] = {}
        self.barrier = threading.Barrier(count, timeout=120)


class OneRank(SequenceRanks):
    """A rank without a process group, which has only its own results. Without threads it is alone, and gets
    the parts that it sends."""

    def __init__(self, index: int, count: int, threads: Threads | None = None) -> None:
        self.count, self._index, self._group, self._exchanges = count, index, None, 0
        self._threads = threads

    def join(self, results_Rt: Tensor, own_t: Tensor, tokens: int) -> Tensor:
        return results_Rt

    def _exchange(self, parts: Tensor) -> Tensor:
        if self._threads is None:
            return parts.clone()
        threads = self._threads
        threads.parts[self._index] = parts
        threads.barrier.wait()
        received = torch.stack([threads.parts[rank][self._index] for rank in range(threads.count)])
        threads.barrier.wait()
        return received
