"""The processes of a learner's ranks on this host: start, let begin, wait, end together.

A standby of them has loaded its libraries and waits for the death of those before it, because a learner that
is restarted spends most of its time on the import of torch and DeepSpeed. A standby holds that memory and
nothing else: no lock, no connection, nothing on a GPU.
"""

import argparse
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncrl.hosting import progress
from asyncrl.hosting.environment import PARENT_VARIABLE
from asyncrl.hosting.supervisor import USER_ERROR

FLAG = "--standby"
MEMORY_SHARE = "--memory-share"
HOST, LEARNER = "--host", "--learner"
# Wait after the first rank has failed: the rank with the root cause may exit later than one that merely lost
# its peers. There is no wait after SIGKILL, which is itself the cause.
CAUSE_S = 2.0
# Time between SIGTERM and SIGKILL, for all ranks together, because a rank may wait for another one to end.
GRACE_S = 25.0


def parse_arguments(prog: str) -> argparse.Namespace:
    """Parse what the learner and the process that starts its ranks are called with."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--store", required=True)
    parser.add_argument("--config", type=Path, required=True)
    # Of the memory of each rank's GPU: less than 1 beside generators.
    parser.add_argument(MEMORY_SHARE, type=float, default=1.0)
    # The host of these ranks, and the address of host 0.
    parser.add_argument(HOST, type=int, default=0)
    parser.add_argument(LEARNER)
    parser.add_argument(FLAG, action="store_true")
    return parser.parse_args()


def name_of(host: int) -> str:
    """Return the name under which the ranks of a host of the learner are kept, and log."""
    return f"ranks-{host}" if host else "learner"


def wait_until_needed() -> str:
    """Return the line that the parent writes to stdin. Exit if the parent closes the pipe."""
    progress.begin("stand by", progress.Pace.QUICK)
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        progress.beat()
    progress.begin("start", progress.Pace.SLOW)
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return line.strip()


def workers_of(here: range) -> list[str]:
    """Name the processes whose progress the supervisor watches; if one hangs, all are restarted."""
    return ["the process that starts the ranks", *(f"rank {rank}" for rank in here)]


def start_ranks(
    command: Sequence[str], here: range, *, ranks: int, address: str, environment: Mapping[str, str]
) -> list["subprocess.Popen[bytes]"]:
    """Start `command` for ranks `here` of `ranks`; each waits for `begin`. `address`: host of rank 0."""
    board = progress.inherited()
    return [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            # A rank whose parent has died before it asks the kernel to be told ends too (`run_role`).
            env=dict(environment)
            | {PARENT_VARIABLE: str(os.getpid())}
            | {"RANK": str(rank), "LOCAL_RANK": str(place), "WORLD_SIZE": str(ranks), "MASTER_ADDR": address}
            | ({} if board is None else progress.variable(board, 1 + place)),
            pass_fds=[] if board is None else [board],
        )
        for place, rank in enumerate(here)
    ]


def free_port(address: str) -> int:
    """Return a port of this host that is free now, for the rendezvous."""
    family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.bind(place)
        return int(probe.getsockname()[1])


def begin(processes: Sequence["subprocess.Popen[bytes]"], port: int) -> None:
    """Write the port of the rendezvous to the ranks, which wait for it."""
    for process in processes:
        assert process.stdin is not None
        # `wait_for_ranks` finds a dead rank.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(b"%d\n" % port)


def wait_for_ranks(
    processes: Sequence["subprocess.Popen[bytes]"], look: Callable[[], int | None] = lambda: None
) -> int:
    """Wait until all have ended or one has failed; return the status of the first that failed, else 0.

    `look` is called all the time. It returns the status with which other hosts have ended, if they have.
    """
    first, until_s = 0, float("inf")
    progress.begin("wait for the ranks")
    while True:
        progress.beat()
        statuses = [process.poll() for process in processes]
        failed = [status for status in statuses if status]
        if failed and not first:
            first = failed[0]
            until_s = time.monotonic() + (0.0 if first == -signal.SIGKILL else CAUSE_S)
        if USER_ERROR in failed:
            return USER_ERROR
        if None not in statuses or time.monotonic() >= until_s:
            return first
        if (over := look()) is not None:
            for process in processes:
                process.kill()  # it would wait for ranks that are gone
            return first or over
        time.sleep(0.05)


def leave(
    processes: Sequence["subprocess.Popen[bytes]"], look: Callable[[], int | None] = lambda: None
) -> None:
    """Ask all ranks to finish their step, save and leave. The supervisor limits the time of that."""
    for process in processes:
        process.terminate()
    wait_for_ranks(processes, look)
