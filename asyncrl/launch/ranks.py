"""Starts and ends the learner's ranks together: `python -m asyncrl.launch.ranks --config FILE --store URL`.

This process holds the run's lock and imports none of the libraries that the ranks need.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from asyncrl.config.load import load_config
from asyncrl.hosting import progress
from asyncrl.hosting.standby import FLAG, MEMORY_SHARE, parse_arguments, wait_until_needed
from asyncrl.hosting.supervisor import USER_ERROR
from asyncrl.launch.roles import run_role
from asyncrl.run.directory import RunDirectory
from asyncrl.run.lock import RunLock
from asyncrl.telemetry.logs import setup_logging

# Wait after the first rank has failed: the rank with the root cause may exit later than one that merely lost
# its peers. There is no wait after SIGKILL, which is itself the cause.
CAUSE_S = 2.0
# Time between SIGTERM and SIGKILL, for all ranks together.
GRACE_S = 25.0


def workers_of(ranks: int) -> list[str]:
    """Name the processes whose progress the supervisor watches; if one hangs, all are restarted."""
    return ["the process that starts the ranks", *(f"rank {rank}" for rank in range(ranks))]


def start_ranks(arguments: Sequence[str], ranks: int) -> list["subprocess.Popen[bytes]"]:
    """Start `python -m asyncrl.launch.learner_process arguments` once per rank, as standbys."""
    board = progress.inherited()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "asyncrl.launch.learner_process", *arguments, FLAG],
            stdin=subprocess.PIPE,
            env=os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
            }
            | ({} if board is None else progress.variable(board, 1 + rank)),
            pass_fds=[] if board is None else [board],
        )
        for rank in range(ranks)
    ]


def begin(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Write the port of the rendezvous to all ranks, which wait for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for process in processes:
        assert process.stdin is not None
        # `wait_for_ranks` finds a dead rank.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(b"%d\n" % port)


def wait_for_ranks(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait until all have ended or one has failed; return the status of the first that failed, else 0."""
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
        time.sleep(0.05)


def end_ranks(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Terminate all ranks together, because a rank may wait for another one to end."""
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


def main() -> None:
    """Start the ranks, let them train once this process is not a standby, and end with their status."""
    arguments = parse_arguments("asyncrl-ranks")

    def role() -> None:
        config = load_config(arguments.config)
        directory = RunDirectory(config.run.directory)
        setup_logging("learner", directory.logs, console=True)
        given = ["--store", arguments.store, "--config", str(arguments.config)]
        given += [MEMORY_SHARE, str(arguments.memory_share)]
        processes = start_ranks(given, config.learner.ranks)
        try:
            if arguments.standby:
                wait_until_needed()
            with RunLock(directory.lock):
                begin(processes)
                status = wait_for_ranks(processes)
        finally:
            end_ranks(processes)
        sys.exit(status)

    run_role(role)


if __name__ == "__main__":
    main()
