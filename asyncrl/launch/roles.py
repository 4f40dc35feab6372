"""What every role process does first and last: dies with its parent, logs to its file, ends with a meaningful status."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from asyncrl.errors import (
    AsyncRLError,
    BufferFenced,
    ConfigError,
    ControlRefused,
    DataError,
    ForeignRunError,
    RewardError,
    RunError,
    StoreRefused,
)
from asyncrl.launch.gpus import visible_devices
from asyncrl.processes import die_with_parent
from asyncrl.supervisor import USER_ERROR

log = logging.getLogger(__name__)

NOT_MENDED_BY_A_RESTART = (
    ConfigError,
    DataError,
    ForeignRunError,
    RewardError,
    RunError,
    BufferFenced,
    StoreRefused,
    ControlRefused,
)

PARENT_VARIABLE = "ASYNCRL_PARENT_PID"
RUN_VARIABLE = "ASYNCRL_RUN_DIRECTORY"
"""Marks every process of a run, so that `asyncrl down` can prove that none is left."""


def child_environment(run_directory: Path, *, threads: int, gpus: Sequence[int]) -> dict[str, str]:
    """Environment of a role process; without `gpus` it sees what we see."""
    visible = {"CUDA_VISIBLE_DEVICES": visible_devices(gpus)} if gpus else {}
    return (
        os.environ
        | visible
        | {
            PARENT_VARIABLE: str(os.getpid()),
            RUN_VARIABLE: str(run_directory.resolve()),
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
    )


def run_role(role: Callable[[], None]) -> None:
    """Run a role's body and exit: 0 done, 2 a mistake that a restart would repeat, 1 anything else."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    die_with_parent(int(parent) if parent else None)
    signal.signal(signal.SIGTERM, _leave)
    try:
        role()
    except NOT_MENDED_BY_A_RESTART as error:
        log.error("%s: %s", type(error).__name__, error)
        sys.exit(USER_ERROR)
    except AsyncRLError:
        log.exception("ended by an error")
        sys.exit(1)


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
