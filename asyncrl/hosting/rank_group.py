"""The processes of a learner's ranks on this host: start, let begin, wait, end together."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from asyncrl.hosting import progress
from asyncrl.hosting.environment import PARENT_VARIABLE
from asyncrl.hosting.supervisor import USER_ERROR

# Wait after the first rank has failed: the rank with the root cause may exit later than one that merely lost
# its peers. There is no wait after SIGKILL, which is itself the cause.
CAUSE_S = 2.0
# Time between SIGTERM and SIGKILL, for all ranks together.
GRACE_S = 25.0


def workers_of(here: range) -> list[str]:
    """Name the processes whose progress the supervisor watches; if one hangs, all are restarted."""
    return ["the process that starts the ranks", *(f"rank {rank}" for rank in here)]


def nobody_else() -> int | None:
    """Return what `wait_for_ranks` asks of other hosts, without any."""
    return None


def start_ranks(
    command: Sequence[str], here: range, *, ranks: int, address: str, environment: Mapping[str, str]
) -> list["subprocess.Popen[bytes]"]:
    """Start `command` for each rank of `here`, of `ranks` in all. Each waits for `begin`.

    `address` is that of rank 0's host.
    """
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
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def begin(processes: Sequence["subprocess.Popen[bytes]"], port: int) -> None:
    """Write the port of the rendezvous to the ranks, which wait for it."""
    for process in processes:
        assert process.stdin is not None
        # `wait_for_ranks` finds a dead rank.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(b"%d\n" % port)


def wait_for_ranks(
    processes: Sequence["subprocess.Popen[bytes]"], look: Callable[[], int | None] = nobody_else
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
    processes: Sequence["subprocess.Popen[bytes]"], look: Callable[[], int | None] = nobody_else
) -> None:
    """Ask all ranks to finish their step, save and leave. The supervisor limits the time of that."""
    for process in processes:
        process.terminate()
    wait_for_ranks(processes, look)


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
