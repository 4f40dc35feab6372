"""A generator without an engine: the real control client and the real staging. Says what happens as JSON
lines.

Its options:
    hang_on     version whose transfer it stops reading half way, for good
    fail_times  how many transfers it declares failed
    secret      of the run, as run.key holds it
    release, config_hash, heartbeat_s, incarnation, transports
"""

import asyncio
import json
import os
import sys
import uuid

from asyncrl.control.base import Heartbeat, Hello, Stop
from asyncrl.control.client import ControlClient
from asyncrl.errors import ControlError, TransferError
from asyncrl.hosting.processes import die_with_parent
from asyncrl.run.keys import RunKeys
from asyncrl.weights.base import TRANSPORTS, UpdateReport
from tests.support import receiver_stand_in as receiving
from tests.support.waiting import hang


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def main(endpoint, generator_id, options):
    heartbeat_s = options.get("heartbeat_s", 0.2)
    keys = RunKeys(bytes.fromhex(options["secret"])).join.control if "secret" in options else None
    client = ControlClient(
        endpoint, heartbeat_s=heartbeat_s, timeout_s=5.0, join_s=options.get("join_s", 30.0), keys=keys
    )
    incarnation = options.get("incarnation", uuid.uuid4().hex[:8])
    hello = Hello(
        generator_id=generator_id,
        incarnation=incarnation,
        release=options.get("release", "1.0"),
        config_hash=options.get("config_hash", "abc"),
        version=0,
        transports=tuple(options.get("transports", TRANSPORTS)),
    )
    try:
        welcome = await client.join(hello)
    except ControlError as error:
        say(refused=str(error))
        return
    say(joined=welcome.version)
    version = 0
    while True:
        beat = Heartbeat(
            generator_id=generator_id, incarnation=incarnation, version=version, state="sampling"
        )
        client.beat(beat)
        order = await client.next_order()
        if isinstance(order, Stop):
            say(stopped=order.reason)
            await client.leave()
            return
        try:
            total = await asyncio.to_thread(receive, order, options)
        except TransferError as error:
            version = -1
            say(failed=order.version, error=str(error))
            await client.report(UpdateReport(version=order.version, applied=False, reason=str(error)))
            continue
        version = order.version
        say(applied=version, sum=total, transport=order.transport)
        await client.report(UpdateReport(version=version, applied=True, probe_max=0.5, probe_limit=1.0))


def receive(order, options):
    def on_tensor():
        if order.version == options.get("hang_on"):
            say(hanging=order.version)
            hang()

    if options.get("fail_times", 0) > 0:
        options["fail_times"] -= 1
        raise TransferError("told to fail")
    return receiving.receive(order, on_tensor)


def work(endpoint, generator_id, options, output):
    """As a process of its own, whose standard output is the pipe `output`."""
    die_with_parent(os.getppid())
    os.dup2(output.fileno(), 1)
    asyncio.run(main(endpoint, generator_id, options))
