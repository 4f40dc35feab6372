"""The position of every parameter in one flat uint8 buffer: pure arithmetic on names, dtypes and shapes.

Tensors start at multiples of 64 bytes, so any dtype can be viewed. Only specs and bucket size cross the wire.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch
import xxhash
from torch import Tensor, nn

from asyncrl.errors import TransferError
from asyncrl.weights.base import TensorSpec

ALIGNMENT_BYTES = 64
_MASK = 2**64 - 1
# Bounds the memory of `device_sum`: 32 MiB beside a large tensor.
_PIECE_WORDS = 1 << 21
_PIECE_BYTES = 8 * _PIECE_WORDS
_ODD = 0x5851F42D4C957F2D
# One core does not read as fast as the memory is. To start threads takes as long as to sum some MB.
_MOST_THREADS = 4
_BYTES_FOR_THREADS = 64 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """The plan of one buffer, made by `plan` or `from_plain`."""

    specs: tuple[TensorSpec, ...]
    # First byte of each tensor, a multiple of 64; then the end of the last one, with padding.
    offsets: tuple[int, ...]
    # Size of the buckets in which tensors go over NCCL.
    bucket_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.offsets[-1]

    @classmethod
    def plan(cls, specs: Sequence[TensorSpec], bucket_bytes: int) -> Self:
        """The layout of these tensors. Raises TransferError: repeated name, unknown dtype, negative size."""
        offsets, seen = [0], set()
        for spec in specs:
            if spec.name in seen:
                raise TransferError(f"layout: tensor {spec.name!r} is given twice; names must differ")
            if min(spec.shape, default=0) < 0:
                raise TransferError(
                    f"layout: tensor {spec.name!r} has shape {list(spec.shape)}; sizes must be 0 or more"
                )
            seen.add(spec.name)
            end = offsets[-1] + _size_bytes(spec)
            offsets.append(-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        return cls(tuple(specs), tuple(offsets), bucket_bytes)

    def to_plain(self) -> dict[str, Any]:
        """Plain values for a message: about 60 bytes per tensor."""
        specs = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.specs]
        return {"specs": specs, "bucket_bytes": self.bucket_bytes}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `to_plain`. Raises TransferError if `plain` is malformed."""
        try:
            specs = [
                TensorSpec(name=str(name), dtype=str(dtype), shape=tuple(map(int, shape)))
                for name, dtype, shape in plain["specs"]
            ]
            bucket_bytes = int(plain["bucket_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(
                f"layout of an update order: malformed ({error!r}); expected specs and bucket_bytes"
            ) from error
        return cls.plan(specs, bucket_bytes)

    def view(self, buffer: Tensor, index: int) -> Tensor:
        """Tensor `index` as a view of `buffer`, uint8 and `total_bytes` long."""
        spec, offset = self.specs[index], self.offsets[index]
        return buffer[offset : offset + _size_bytes(spec)].view(_dtype(spec)).view(spec.shape)

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Tensor, begin and end of each piece: `bucket_bytes` at most, rounded to pieces of `device_sum`."""
        step = max(self.bucket_bytes // _PIECE_BYTES, 1) * _PIECE_BYTES
        for index, (spec, offset) in enumerate(zip(self.specs, self.offsets, strict=False)):
            end = offset + _size_bytes(spec)
            for begin in range(offset, end, step):
                yield index, begin, min(begin + step, end)


def checksums(buffer: Tensor, layout: Layout) -> tuple[int, ...]:
    """XXH3-64 of every tensor, without the padding; a large one takes threads. On a GPU `device_sum`."""
    count = len(layout.specs)
    if buffer.is_cuda:
        of_views = [device_sum(layout.view(buffer, index)) for index in range(count)]
        return tuple(torch.stack(of_views).tolist())  # waits for the GPU once
    memory, sums = buffer.numpy().data, [0] * count
    # The largest tensor first, so that the threads end at about the same time.
    todo = iter(sorted(range(count), key=lambda index: _size_bytes(layout.specs[index]), reverse=True))

    def work(_: int) -> None:
        for index in todo:  # each goes to one thread; xxhash lets the others run
            sums[index] = _host_sum(memory, layout, index)

    if (threads := checksum_threads(layout.total_bytes)) == 1:
        work(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))  # raises what a thread raised
    return tuple(sums)


def checksum_threads(size_bytes: int) -> int:
    """How many threads `checksums` takes for a version of this size in host memory."""
    return 1 if size_bytes < _BYTES_FOR_THREADS else min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _host_sum(memory: memoryview, layout: Layout, index: int) -> int:
    """The checksum of one tensor, without a view of it, which takes microseconds."""
    start = layout.offsets[index]
    return xxhash.xxh3_64_intdigest(memory[start : start + _size_bytes(layout.specs[index])])


def device_sum(tensor: Tensor, before: Tensor | None = None) -> Tensor:
    """int64 []: the tensor's 8-byte words, each times an odd number of its own, summed modulo 2^64.

    An odd number has an inverse modulo 2^64, so a change of one word always changes the sum. `before` is the
    sum of the first part of a tensor, if `tensor` is the rest; the first part ends between two pieces.
    """
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = nn.functional.pad(data, (0, -len(data) % 8))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device) if before is None else before
    words = data.view(torch.int64)
    factors = 2 * torch.arange(min(len(words), _PIECE_WORDS), dtype=torch.int64, device=tensor.device) + 1
    for piece in torch.split(words, _PIECE_WORDS):
        total = total * _ODD + (piece * factors[: len(piece)]).sum()
    return total


def verify(buffer: Tensor, layout: Layout, expected: Sequence[int], index: int | None = None) -> None:
    """Compare the checksums of all tensors, or of one in host memory. Raises TransferError if one differs."""
    if len(expected) != len(layout.specs):
        raise TransferError(
            f"weights: got {len(expected)} checksums for {len(layout.specs)} tensors; one each is needed"
        )
    if index is not None:
        found = _host_sum(buffer.numpy().data, layout, index)
        require_equal(layout.specs[index].name, found, expected[index])
        return
    for spec, *sums in zip(layout.specs, checksums(buffer, layout), expected, strict=True):
        require_equal(spec.name, *sums)


def require_equal(name: str, found: int, expected: int) -> None:
    """Raise TransferError unless the checksums of a tensor are equal."""
    if found != expected:
        raise TransferError(
            f"weights: tensor {name!r} has checksum {found & _MASK:#018x}, the learner sent "
            f"{expected & _MASK:#018x}; these weights must not be used, transfer them again"
        )


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise TransferError(
            f"layout: tensor {spec.name!r} has dtype {spec.dtype!r}; use a torch dtype such as bfloat16"
        )
    return dtype


def _size_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _dtype(spec).itemsize
