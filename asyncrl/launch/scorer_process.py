"""A process of a reward model or teacher; it dies with the supervisor that started it, and has no state."""

import argparse
import asyncio
import logging
import os
from pathlib import Path

import numpy as np

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.control.scoring import Score, endpoint_of, serve_scores
from asyncrl.engine.open import open_classifier, open_engine
from asyncrl.hosting.gpus import resolve_device
from asyncrl.hosting.processes import die_with_spawner
from asyncrl.hosting.progress import Pace, beat, begin
from asyncrl.launch.generator_process import allotted
from asyncrl.launch.roles import run_role
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import forget_secrets
from asyncrl.telemetry.logs import setup_logging

log = logging.getLogger(__name__)
# Seconds between two proofs that the engine lives. After each, vLLM's worker looks for work for a second
# without pause, on a core of its own.
PROBE_S = 10.0


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
    model = (config.scorers | config.teacher)[name].model
    log.info("loading %s", model)
    generator, sampling, device = (
        allotted(config, None, is_shared=False),
        config.sampling,
        resolve_device(config),
    )
    score: Score
    if name in config.teacher:
        # vLLM samples one token behind those it scores. Its settings are of the policy.
        sampling = sampling.model_copy(update={"max_response_tokens": sampling.max_response_tokens + 1})
        generator = generator.model_copy(update={"vllm": {}})
        engine = await open_engine(config.reference, generator, sampling, config.weights, device=device)

        async def score(token_ids: list[int]) -> bytes:
            return (await engine.score(token_ids)).astype(np.float32).tobytes()
    else:
        # The longest sequence of the policy, and no token of its own.
        dtype, most = config.model.dtype, sampling.max_tokens
        score = open_classifier(model, dtype, generator, max_tokens=most, device=device)
    await score([0, 0])  # warm, and known to work
    begin("score")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_scores(endpoint, score))
        while True:
            await score([0, 0])
            beat()
            await asyncio.sleep(PROBE_S)


if __name__ == "__main__":
    main()
# For the engine's processes, which wait minutes for a dead parent before they load our plugin.
elif __name__ == "__mp_main__":
    die_with_spawner()
