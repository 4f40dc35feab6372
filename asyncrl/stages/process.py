"""One rank of a stage, or what starts several: `python -P -m asyncrl.stages.process --config FILE`."""

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from asyncrl.config.load import load
from asyncrl.hosting.processes import module_argv
from asyncrl.hosting.rank_group import wait_until_needed
from asyncrl.launch.ranks import OnlyHost, run_ranks
from asyncrl.launch.roles import run_role
from asyncrl.run.directory import RunDirectory
from asyncrl.run.lock import RunLock
from asyncrl.stages.settings import StageConfig
from asyncrl.telemetry.logs import setup_logging


def main() -> None:
    """Train, or with several ranks start them and end with their status."""
    parser = argparse.ArgumentParser(prog="asyncrl-stage")
    parser.add_argument("--config", type=Path, required=True)
    file = parser.parse_args().config

    def role() -> None:
        rank = os.environ.get("RANK")
        if rank:
            os.environ["MASTER_PORT"] = wait_until_needed()
        config = load(StageConfig, file)
        directory = RunDirectory(config.run.directory)
        setup_logging("stage", directory.logs, console=True)
        if config.ranks > 1 and not rank:
            command = module_argv("asyncrl.stages.process", "--config", str(file))
            sys.exit(run_ranks(command, config.ranks, lambda: OnlyHost(directory.lock)))
        from asyncrl.stages.with_trl import train

        with nullcontext() if rank else RunLock(directory.lock):
            train(config, directory, leads=rank in (None, "0"))

    run_role(role)


if __name__ == "__main__":
    main()
