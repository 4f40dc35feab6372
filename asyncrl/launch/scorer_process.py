"""One process of a reward model; it dies with the supervisor that started it, and has no state."""

import argparse
import asyncio
import logging
import os
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.control.scoring import endpoint_of, serve_scores
from asyncrl.engine.open import open_classifier
from asyncrl.hosting.gpus import resolve_device
from asyncrl.hosting.processes import die_with_spawner
from asyncrl.hosting.progress import Pace, beat, begin
from asyncrl.launch.generator_process import allotted
from asyncrl.launch.roles import run_role
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import forget_secrets
from asyncrl.telemetry.logs import setup_logging

log = logging.getLogger(__name__)
PROBE_S = 1.0


def main() -> None:
    """Parse arguments and score until the run ends."""
    parser = argparse.ArgumentParser(prog="asyncrl-scorer")
    parser.add_argument("--name", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args()

    def role() -> None:
        directory = RunDirectory(arguments.config.parent)
        setup_logging(f"{arguments.name}.{arguments.index}", directory.logs, console=True)
        forget_secrets(os.environ)
        endpoint = endpoint_of(directory.path, arguments.name, arguments.index)
        asyncio.run(_score(load_config(arguments.config), arguments.name, endpoint))

    run_role(role)


async def _score(config: Config, name: str, endpoint: str) -> None:
    begin("load the model", Pace.SLOW)
    model = config.scorers[name].model
    log.info("loading %s", model)
    # The longest sequence of the policy, and no token of its own.
    score = open_classifier(
        model,
        config.model.dtype,
        allotted(config, None, is_shared=False),
        max_tokens=config.sampling.max_tokens,
        device=resolve_device(config),
    )
    await score([0])  # warm, and known to work
    begin("score")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_scores(endpoint, score))
        while True:
            await score([0])
            beat()
            await asyncio.sleep(PROBE_S)


if __name__ == "__main__":
    main()
# For the engine's processes, which wait minutes for a dead parent before they load our plugin.
elif __name__ == "__mp_main__":
    die_with_spawner()
