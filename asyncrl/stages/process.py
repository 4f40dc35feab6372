"""One rank of a stage, or what starts several: `python -P -m asyncrl.stages.process --config FILE`."""

import argparse
import os
import sys
from pathlib import Path

from asyncrl.config.load import load
from asyncrl.hosting.processes import module_argv
from asyncrl.hosting.standby import wait_until_needed
from asyncrl.launch.ranks import run_ranks
from asyncrl.launch.roles import run_role
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory, needing
from asyncrl.run.lock import RunLock
from asyncrl.stages.settings import StageConfig
from asyncrl.telemetry.logs import setup_logging

RANK, RESUME = "RANK", "--resume"


def main() -> None:
    """Train, or with several ranks start them and end with their status."""
    parser = argparse.ArgumentParser(prog="asyncrl-stage")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument(RESUME, type=Path)
    arguments = parser.parse_args()

    def role() -> None:
        is_rank = RANK in os.environ
        if is_rank:
            os.environ["MASTER_PORT"] = wait_until_needed()
        config = load(StageConfig, arguments.config)
        directory = RunDirectory(config.run.directory)
        setup_logging("stage", directory.logs, console=True)
        store = checkpoints_of(directory)
        resume = arguments.resume
        if not is_rank:
            with needing(directory.path):
                resume = store.choose()
        if config.ranks > 1 and not is_rank:
            command = module_argv("asyncrl.stages.process", "--config", str(arguments.config))
            command += [RESUME, str(resume)] if resume else []
            sys.exit(run_ranks(command, config.ranks, directory.lock))
        from asyncrl.stages.with_trl import train

        if is_rank:
            train(config, directory, resume, store, rank=int(os.environ[RANK]))
            return
        with RunLock(directory.lock):
            train(config, directory, resume, store, rank=0)

    run_role(role)


def checkpoints_of(directory: RunDirectory) -> CheckpointStore:
    """Return the checkpoints that TRL writes; it also removes old ones (`trl.save_total_limit`)."""
    key = directory.checkpoint_key()
    return CheckpointStore(directory.trl_checkpoints, key, keep=2, form="checkpoint-{}")


if __name__ == "__main__":
    main()
