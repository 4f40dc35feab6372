"""What all roles have in common: they die with their parent and exit with a status that says what to do."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.buffer.connection import StoreConnection
from asyncrl.config.store import StoreConfig
from asyncrl.errors import (
    AsyncRLError,
    BufferFenced,
    CheckpointError,
    CodeChanged,
    ConfigError,
    ControlRefused,
    DataError,
    EngineError,
    ForeignRunError,
    MemoryFullError,
    RewardError,
    RunError,
    StoreRefused,
    UpdatesRefused,
)
from asyncrl.hosting.environment import PARENT_VARIABLE
from asyncrl.hosting.processes import die_with_parent
from asyncrl.hosting.progress import attach
from asyncrl.hosting.supervisor import FAULT_FOUND, USER_ERROR
from asyncrl.plugins import described
from asyncrl.run.keys import JoinKeys, RunKeys, store_password
from asyncrl.unpickling import refuse_pickles_from_wires

log = logging.getLogger(__name__)

NOT_FIXED_BY_A_RESTART = (
    CodeChanged,
    ConfigError,
    DataError,
    ForeignRunError,
    MemoryFullError,
    RewardError,
    RunError,
    BufferFenced,
    StoreRefused,
    ControlRefused,
    UpdatesRefused,
)
# Errors that are likely to come again, because their cause is on this machine: a file, a library, a device.
LIKELY_AGAIN = (CheckpointError, EngineError)
# A store that is started again is back sooner.
STORE_RETRY_S = 30.0


def run_role(role: Callable[[], None]) -> None:
    """Run a role and exit: 0 done, 2 a restart would repeat the error, 3 it may repeat it, 1 other errors."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    die_with_parent(int(parent) if parent else None)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    attach()
    refuse_pickles_from_wires()
    try:
        role()
    except NOT_FIXED_BY_A_RESTART as error:
        log.error("%s: %s", type(error).__name__, error)
        sys.exit(USER_ERROR)
    except AsyncRLError as error:
        log.exception("ended by an error")
        sys.exit(FAULT_FOUND if isinstance(error, LIKELY_AGAIN) else 1)


@contextmanager
def no_exit() -> Iterator[None]:
    """Raise RunError if user code within ends this process: it may be `sys.exit(0)`, and look finished."""
    try:
        yield
    except SystemExit as error:
        found = f"code of the config ended its process: {described(error)}"
        raise RunError(f"{found}; raise an error there") from error


def join_store(store: StoreConfig, url: str, keys: RunKeys | JoinKeys) -> StoreConnection:
    """Connect a role, and take the password of a configured store out of this process's environment."""
    password = store_password(store, url, keys, os.environ)
    os.environ.pop(store.password_env, None)
    return StoreConnection(url, password=password, retry_s=STORE_RETRY_S)
