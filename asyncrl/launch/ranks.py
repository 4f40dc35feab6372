"""Starts and ends the learner's ranks of a host: `python -m asyncrl.launch.ranks --config FILE --store URL`.

The process of host 0 holds the run's lock. None imports the libraries that the ranks need.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from asyncrl.config.addresses import AUTO, CONTROL_PORT, beside, filled_in, host_of
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.control.meeting import FollowerHost, LeadHost, Terms
from asyncrl.hosting import rank_group
from asyncrl.hosting.processes import module_argv, stop_processes
from asyncrl.launch.roles import run_role
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import run_keys
from asyncrl.run.lock import RunLock
from asyncrl.run.manifest import UNFINISHED
from asyncrl.telemetry.logs import setup_logging

ADDRESS = "127.0.0.1"  # where the ranks of one host meet


class OnlyHost(RunLock):
    """The host of all ranks, which holds the run's lock; else as in `control/meeting.py`."""

    def meet(self) -> int:
        return rank_group.free_port(ADDRESS)

    def look(self) -> None:
        return None

    def finish(self, status: int) -> int:
        return status


RankHost = OnlyHost | LeadHost | FollowerHost


def run_ranks(
    command: Sequence[str],
    ranks: int,
    open_host: Callable[[], AbstractContextManager[RankHost]],
    wait: Callable[[], object] = lambda: None,
    *,
    here: range | None = None,
    address: str = ADDRESS,
) -> int:
    """Run `command` as each rank of `here`, of `ranks` in all, and return the status of their end.

    They begin after `wait`, and once all hosts are there. `address` is that of rank 0.
    """
    here = range(ranks) if here is None else here
    processes = rank_group.start_ranks(command, here, ranks=ranks, address=address, environment=os.environ)
    host: RankHost | None = None
    with ExitStack() as stack:
        stack.callback(stop_processes, processes, grace_s=rank_group.GRACE_S)
        try:
            wait()
            host = stack.enter_context(open_host())
            rank_group.begin(processes, host.meet())
            status = host.finish(rank_group.wait_for_ranks(processes, host.look))
            return status if status >= 0 else 128 - status  # as shells give it: no exit status is negative
        except SystemExit:
            rank_group.leave(processes, host.look if host else lambda: None)
            raise


def _lead_bind(config: Config, learner: str | None) -> str:
    """Return the address for other hosts of host 0, which is at `learner`. Rank 0 listens at no other."""
    return str(filled_in(config.control.bind or AUTO, learner or "", CONTROL_PORT))


def learner_host(
    config: Config, directory: RunDirectory, number: int, learner: str | None
) -> Callable[[], AbstractContextManager[RankHost]]:
    """Return what opens host `number` of the learner, whose host 0 has the address `learner`."""
    hosts = config.cluster.learner_hosts
    if hosts == 1:
        return partial(OnlyHost, directory.lock)
    keys = run_keys(os.environ)
    listening, calling = keys.ranks
    # Addresses and the place of slots are those of host 0.
    own = {"control": {"bind"}, "store": {"bind"}, "weights": {"slots"}}
    terms = Terms(
        endpoint=beside(_lead_bind(config, learner)),
        wire_key=keys.join.wire,
        config=hashlib.sha256(config.model_dump_json(exclude=own).encode()).hexdigest()[:16],
        hosts=hosts,
        probe=lambda token: directory.checkpoints / f"{UNFINISHED}{token}",
        heartbeat_s=config.control.heartbeat_s,
        silent_s=config.control.timeout_s,
        pending_s=config.cluster.pending_s,
    )
    if number:
        return partial(FollowerHost, terms, calling, number)

    @contextmanager
    def lead() -> Iterator[LeadHost]:
        with RunLock(directory.lock), LeadHost(terms, listening) as host:
            yield host

    return lead


def main() -> None:
    """Start the ranks, let them train once this process is not a standby, and end with their status."""
    arguments = rank_group.parse_arguments("asyncrl-ranks")

    def role() -> None:
        config = load_config(arguments.config)
        directory, number = RunDirectory(config.run.directory), arguments.host
        setup_logging(rank_group.name_of(number), directory.logs, console=True)
        command = module_argv("asyncrl.launch.learner_process", rank_group.FLAG, rank_group.HOST, str(number))
        command += ["--store", arguments.store, "--config", str(arguments.config)]
        command += [rank_group.MEMORY_SHARE, str(arguments.memory_share)]
        each, several = config.ranks_per_host, config.cluster.learner_hosts > 1
        status = run_ranks(
            command,
            config.learner.ranks,
            learner_host(config, directory, number, arguments.learner),
            rank_group.wait_until_needed if arguments.standby else lambda: None,
            here=range(number * each, (number + 1) * each),
            address=host_of(_lead_bind(config, arguments.learner)) if several else ADDRESS,
        )
        sys.exit(status)

    run_role(role)


if __name__ == "__main__":
    main()
