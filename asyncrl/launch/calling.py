"""How a generator finds the learner, and what it says of itself."""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.run_record import RunRecord
from asyncrl.config.resolved import config_hash, host_digest
from asyncrl.config.schema import Config
from asyncrl.config.sections import ControlConfig
from asyncrl.control.base import Hello
from asyncrl.control.client import ControlClient
from asyncrl.errors import ControlError, StoreError
from asyncrl.hosting.processes import closed_to_us
from asyncrl.hosting.route import of_generators, unreached
from asyncrl.run.keys import JoinKeys
from asyncrl.version import __version__
from asyncrl.weights.base import TRANSPORTS, UpdateOrder

log = logging.getLogger(__name__)

# Longest wait for a learner that loads a large model.
LEARNER_START_S = 600.0


def hello_of(config: Config, generator_id: str, *, confirm: bool) -> Hello:
    """Return the message that joins; with `confirm` the learner must have the same code and environment."""
    return Hello(
        generator_id=generator_id,
        incarnation=uuid.uuid4().hex[:12],
        release=__version__,
        config_hash=config_hash(config),
        version=0,
        pid=os.getpid(),
        host=socket.gethostname(),
        host_digest=host_digest(config) if confirm else "",
    )


async def call_learner(
    config: ControlConfig, store: StoreConnection, keys: JoinKeys, on_order: Callable[[UpdateOrder], None]
) -> ControlClient:
    """Wait for the learner of the run that the store serves. Raises ControlError."""
    log.info("calling the learner")
    record = RunRecord(store, keys.record)
    endpoint = await _control_endpoint(store, record)

    async def endpoint_now() -> str:  # empty if the store does not answer
        try:
            return (await asyncio.to_thread(record.read)).control_endpoint
        except StoreError as error:
            log.warning("the learner's endpoint cannot be read: %s", error)
            return ""

    if endpoint.startswith("tcp://"):
        for closed in await asyncio.to_thread(list, unreached(of_generators(endpoint), config.timeout_s)):
            log.warning("%s", closed)
    return ControlClient(
        endpoint,
        find_learner=endpoint_now,
        heartbeat_s=config.heartbeat_s,
        timeout_s=config.timeout_s,
        wire_key=keys.wire,
        keys=keys.control,
        on_order=on_order,
    )


def usable(endpoint: str, transports: tuple[str, ...] = TRANSPORTS) -> tuple[str, ...]:
    """Leave out what needs the learner's memory or its network, if this process can have neither."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint:  # another host, perhaps
        return transports
    try:
        obstacle = closed_to_us(Path(path))
    except ConnectionRefusedError:  # an earlier learner left the file, and the next one is not there yet
        return transports
    except OSError as error:
        log.warning("whether the learner's memory can be read is not known: %s", error)
        return transports
    if not obstacle:
        return transports
    log.warning(
        "this generator cannot read the learner's memory, because %s, so weights come over files, which is "
        "slower; start both in one container and as one user, or set control.bind",
        obstacle,
    )
    return tuple(name for name in transports if name not in ("slot", "tcp", "nccl"))


async def _control_endpoint(store: StoreConnection, record: RunRecord) -> str:
    """Wait for the learner's endpoint. While the learner loads, the record may be missing or an older one."""
    until_s, logged = time.monotonic() + LEARNER_START_S, ""
    while True:
        found = "no learner has recorded its endpoint"
        try:
            if endpoint := (await asyncio.to_thread(record.read)).control_endpoint:
                return endpoint
        except StoreError as error:
            found = str(error)
        if time.monotonic() > until_s:
            raise ControlError(
                f"store {store.url}: {LEARNER_START_S:.0f} s without a learner; start it. Last: {found}"
            )
        if found != logged:
            logged = found
            log.info("waiting for the learner: %s", found)
        await asyncio.sleep(0.2)
