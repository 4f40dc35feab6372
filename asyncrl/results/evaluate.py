"""`asyncrl eval`: a checkpoint or a model on the held-out prompts, by the same engine and rewards as in training."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, vocabulary_size
from asyncrl.engine.sampler import Sampler
from asyncrl.errors import RunError
from asyncrl.evaluation import summarise
from asyncrl.launch.directory import find_run
from asyncrl.launch.generator import resolve_device, sampling_spec
from asyncrl.launch.wiring import eval_limits
from asyncrl.results.export import newest_export
from asyncrl.rewards.pool import RewardPool


def evaluate_model(model: str, config_path: Path | None, overrides: Sequence[str]) -> None:
    """Print the metrics as JSON."""
    if config_path is None:
        directory = find_run(Path(model))
        config_path, model = directory.config, str(newest_export(directory))
    config = load_config(config_path, [*overrides, f"model.path={model}"])
    if config.data.eval is None:
        raise RunError(f"{config_path}: data.eval is not set; there is nothing to evaluate on")
    print(json.dumps(asyncio.run(_evaluate(config)), indent=1))  # noqa: T201 - the command's output


async def _evaluate(config: Config) -> dict[str, float]:
    from asyncrl.engine.vllm import VLLMEngine

    prompts = PromptSource(config.data, config.model, config.sampling, seed=config.run.seed)
    spec = sampling_spec(config, config.eval.temperature)
    limits = eval_limits(config, vocabulary_size(config.model))
    scorer = RewardPool(config.reward, config.run.root)
    engine = await VLLMEngine.start(
        config.model, config.generator, config.sampling, config.weights, device=resolve_device(config)
    )
    sampler = Sampler(engine, scorer, prompts.decode, "eval")
    try:
        groups = await asyncio.gather(
            *(
                sampler.group(prompt, number, limits, spec)
                for number, prompt in enumerate(prompts.eval_prompts(config.eval.prompts), start=1)
            )
        )
    finally:
        await scorer.close()
        await engine.close()
    return summarise(groups, version=0).metrics
