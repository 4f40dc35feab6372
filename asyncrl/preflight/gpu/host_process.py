"""A process that stages versions, for the row `weights`: the part of a generator outside of its engine."""

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from asyncrl.weights.base import UpdateOrder
from asyncrl.weights.staging import HostStaging


@dataclass(frozen=True, slots=True)
class HostProcess:
    """The process, see `open_host_process`."""

    pid: int
    _pool: ProcessPoolExecutor
    _files: Path

    async def stage(self, order: UpdateOrder) -> UpdateOrder:
        """Return the order for the engine. Raises TransferError."""
        return await asyncio.wrap_future(self._pool.submit(_stage, self._files, order))


@contextmanager
def open_host_process(files: Path) -> Iterator[HostProcess]:
    """Start the process, and end it. Orders may name paths below `files`."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield HostProcess(pool.submit(os.getpid).result(), pool, files)
        pool.submit(_close, files).result()


@cache
def _staging(files: Path) -> HostStaging:
    return HostStaging(files)


def _stage(files: Path, order: UpdateOrder) -> UpdateOrder:
    return _staging(files).stage(order)


def _close(files: Path) -> None:
    _staging(files).close()
