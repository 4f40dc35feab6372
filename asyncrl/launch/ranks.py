"""The learner's ranks on one host: started together, ended together."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from asyncrl.supervisor import USER_ERROR

CAUSE_S = 2.0
"""After the first failed rank: time for the one that knows why. A rank that lost its peers may die before it."""
GRACE_S = 25.0
"""Between SIGTERM and SIGKILL, for all ranks together."""


def run_ranks(module: str, arguments: Sequence[str], ranks: int) -> int:
    """Run `python -m module arguments` once per rank; the first exit that is not 0 ends all.

    Returns 0, or the first failed status; `USER_ERROR` goes first, as restarting would only repeat it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(ranks)
    ]
    try:
        return wait_for_ranks(processes)
    finally:
        end_ranks(processes)


def wait_for_ranks(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Exit status of all ranks together; does not end those that still run."""
    first, until_s = 0, float("inf")
    while True:
        statuses = [process.poll() for process in processes]
        failed = [status for status in statuses if status]
        if failed and not first:
            first, until_s = failed[0], time.monotonic() + CAUSE_S
        if USER_ERROR in failed:
            return USER_ERROR
        if None not in statuses or time.monotonic() > until_s:
            return first
        time.sleep(0.05)


def end_ranks(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Terminate all at once: a rank may wait for another to leave."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until_s = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(timeout=max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    for process in processes:
        process.wait(timeout=10.0)
