"""Fresh processes, forked from one that has imported what they need: importing torch and DeepSpeed takes longer
than most of what they are asked to do."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}


@contextmanager
def fork_server(module: str) -> Iterator[ForkServerContext]:
    """Forks processes that have imported `module`. Processes that are left go with it."""
    # Python has one fork server for all; another test may have left one that imports something else.
    server: Any = forkserver._forkserver
    server._stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    try:
        yield context
    finally:
        server._stop()
