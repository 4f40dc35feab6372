"""The learner's ranks on one host: started together, ended together."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from asyncrl.processes import stop_process


def run_ranks(module: str, arguments: Sequence[str], ranks: int) -> int:
    """Run `python -m module arguments` once per rank; the first exit that is not 0 ends all. Returns its status."""
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
        return _first_failure(processes)
    finally:
        for process in processes:
            stop_process(process, grace_s=5.0)


def _first_failure(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    while True:
        statuses = [process.poll() for process in processes]
        failed = [status for status in statuses if status not in (None, 0)]
        if failed:
            return failed[0] or 1
        if all(status == 0 for status in statuses):
            return 0
        time.sleep(0.1)
