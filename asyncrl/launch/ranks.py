"""Starts and ends the learner's ranks together: `python -m asyncrl.launch.ranks --config FILE --store URL`.

This process holds the run's lock and imports none of the libraries that the ranks need.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.hosting.processes import module_argv
from asyncrl.hosting.rank_group import begin, end_ranks, free_port, leave, start_ranks, wait_for_ranks
from asyncrl.hosting.standby import FLAG, MEMORY_SHARE, parse_arguments, wait_until_needed
from asyncrl.launch.roles import run_role
from asyncrl.run.directory import RunDirectory
from asyncrl.run.lock import RunLock
from asyncrl.telemetry.logs import setup_logging

# All ranks are on this host.
ADDRESS = "127.0.0.1"


def run_ranks(
    command: Sequence[str], ranks: int, lock: Path, wait: Callable[[], object] = lambda: None
) -> int:
    """Run `command` as each rank, after `wait` and holding the lock, and return the status of their end."""
    processes = start_ranks(command, range(ranks), ranks=ranks, address=ADDRESS, environment=os.environ)
    try:
        wait()
        with RunLock(lock):
            begin(processes, free_port(ADDRESS))
            return wait_for_ranks(processes)
    except SystemExit:
        leave(processes)
        raise
    finally:
        end_ranks(processes)


def main() -> None:
    """Start the ranks, let them train once this process is not a standby, and end with their status."""
    arguments = parse_arguments("asyncrl-ranks")

    def role() -> None:
        config = load_config(arguments.config)
        directory = RunDirectory(config.run.directory)
        setup_logging("learner", directory.logs, console=True)
        command = module_argv("asyncrl.launch.learner_process", FLAG)
        command += ["--store", arguments.store, "--config", str(arguments.config)]
        command += [MEMORY_SHARE, str(arguments.memory_share)]
        wait = wait_until_needed if arguments.standby else lambda: None
        sys.exit(run_ranks(command, config.learner.ranks, directory.lock, wait))

    run_role(role)


if __name__ == "__main__":
    main()
