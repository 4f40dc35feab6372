"""One rank of the learner: `python -m asyncrl.launch.learner_process --config FILE --store URL`."""

import os
from contextlib import nullcontext

from asyncrl.config.addresses import is_loopback
from asyncrl.config.load import load_config
from asyncrl.data.data_files import DataFiles
from asyncrl.hosting.gpus import resolve_device
from asyncrl.hosting.rank_group import name_of, parse_arguments, wait_until_needed
from asyncrl.hosting.route import interface_towards
from asyncrl.launch.roles import join_store, no_exit, run_role
from asyncrl.launch.training import train
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import forget_secrets, run_keys
from asyncrl.run.lock import RunLock
from asyncrl.run.saved import read_saved, refuse_changes
from asyncrl.run.starts import code_at_start
from asyncrl.telemetry.logs import setup_logging
from asyncrl.trainer.collectives import Rendezvous
from asyncrl.trainer.device import choose_device, limit_memory


def main() -> None:
    """Parse arguments, wait if this is a standby, and train."""
    arguments = parse_arguments("asyncrl-learner")

    def role() -> None:
        if arguments.standby:
            os.environ["MASTER_PORT"] = wait_until_needed()
        config = load_config(arguments.config)
        directory, data = RunDirectory(config.run.directory), DataFiles(config)
        refuse_changes(config, directory, read_saved(directory), data)
        logs = setup_logging(name_of(arguments.host), directory.logs, console=True)
        keys = run_keys(os.environ)
        forget_secrets(os.environ)
        store = join_store(config.store, arguments.store, keys)
        rendezvous = Rendezvous.of(config, os.environ)
        if not is_loopback(rendezvous.address):
            # By default NCCL takes any interface that is up. (`trainer.collectives` chooses for Gloo.)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_towards(rendezvous.address)}")
        device = choose_device(config.learner, rendezvous.local_rank, auto=resolve_device(config))
        limit_memory(device, arguments.memory_share)
        # With several ranks, the process that started those of host 0 holds the lock.
        with no_exit(), RunLock(directory.lock) if config.learner.ranks == 1 else nullcontext():
            code = code_at_start(config, os.environ)
            train(config, directory, store, keys, data, rendezvous, device, code, logs)

    run_role(role)


if __name__ == "__main__":
    main()
