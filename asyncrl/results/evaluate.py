"""`asyncrl eval`: a checkpoint or a model on held-out prompts, with the engine and rewards of training."""

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path

from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.lanes import group_limits
from asyncrl.config.document import read
from asyncrl.config.load import load_config
from asyncrl.config.named_files import is_stage
from asyncrl.config.resolved import dump_values
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, vocabulary_size
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.sampler import GroupSampler
from asyncrl.errors import EngineError, ResultError, RunError, RunNotUp, reason_of
from asyncrl.evaluation import summarise
from asyncrl.hosting.processes import die_with_spawner
from asyncrl.lora import SETTINGS, require_usable
from asyncrl.results.engine_process import ask, sampler_of, serve
from asyncrl.results.export import saved_export
from asyncrl.run.directory import find_run
from asyncrl.types import Group, Prompt


def evaluate_model(
    model: str,
    config_path: Path | None,
    overrides: Sequence[str],
    *,
    best: bool = False,
    only: Sequence[str] = (),
) -> dict[str, float]:
    """Return metrics of a run's newest or best checkpoint, or of a model, on all sets or `only` on these.

    Raises RunError.
    """
    if config_path is not None and not (Path(model) / "config.json").exists():
        with contextlib.suppress(*() if best else (RunNotUp,)):  # a name on the hub
            model = str(saved_export(find_run(Path(model)), best=best))
    if config_path is None:
        if (Path(model) / "config.json").exists() and not (Path(model) / "config.yaml").exists():
            hint = f"name the config with the held-out prompts: asyncrl eval {model} FILE"
            raise RunError(f"{model} is a model, not a run; {hint}")
        directory = find_run(Path(model))
        config_path, model = directory.config, str(saved_export(directory, best=best))
        if is_stage(config_path):
            hint = f"name the config with the held-out prompts: asyncrl eval {model} FILE"
            raise RunError(f"{directory.path} is a stage, whose rows are no prompts; {hint}")
    is_adapter = (Path(model) / SETTINGS).exists()
    # Of a whole model, an adapter of the config is no part; and nothing is compared with a reference.
    value = dump_values(model, in_a_line=True)
    chosen = [f"model.path={value}", "model.lora=null"]
    if is_adapter:
        chosen = [f"model.lora.start={value}", "model.lora.sync=adapter", "algorithm.reference=null"]
    elif model != read(Config, config_path)[0].nearest(("model", "path")).value:
        overrides = ["model.revision=null", *overrides]  # that of the config is one of its own model
    overrides = [*overrides, *chosen]
    sets = load_config(config_path, overrides).data.sets
    if not sets:
        raise RunError(f"{config_path}: data.eval is not set; there is nothing to evaluate on")
    if unknown := sorted({*only} - sets.keys()):
        known = ", ".join(filter(None, sets)) or "none, because it is one path; leave out --only"
        raise RunError(f"{config_path}: data.eval has no set {', '.join(unknown)}; its sets: {known}")
    metrics: dict[str, float] = ask("asyncrl.results.evaluate", config_path, overrides, *only)
    return metrics


async def _evaluate(config: Config, *only: str) -> dict[str, float]:
    if config.model.lora is not None:
        require_usable(config.model.lora, config.model.path)
    prompts = PromptSource.of(config)
    vocabulary, metrics, failed = vocabulary_size(config.model), dict[str, float](), list[str]()
    sets = {name: config.of(one) for name, one in config.data.sets.items() if not only or name in only}
    asked = {name: prompts.eval_prompts(one.eval.prompts, name) for name, one in sets.items()}
    tasks = {found[0].task for found in asked.values()}
    async with sampler_of(config, prompts, "eval", tasks) as sampler:
        for name, one in sets.items():
            spec = SamplingSpec.of(one.sampling, one.eval.temperature)
            limits = group_limits(one, vocabulary)[1]
            # The seconds of an episode that waits for the engine count, too. A single response may wait.
            held = one.generator.max_running * (1 if one.environment.is_used else 4) // limits.rollouts
            room = asyncio.Semaphore(max(1, held))
            ask_for = partial(_answered, sampler, limits, spec, room, config.reward.attempts)
            groups = await asyncio.gather(*map(ask_for, asked[name], count(1)))
            metrics |= summarise(groups, version=0, name=name).metrics
            if all(group.dead_reason for group in groups):
                where = f"data.eval{f' {name}' if name else ''}: each of {len(groups)} prompts failed"
                failed.append(f"{where}, the first with: {groups[0].dead_reason}")
    if len(failed) == len(sets):
        raise RunError("; ".join(failed))
    return metrics


async def _answered(
    sampler: GroupSampler,
    limits: GroupLimits,
    spec: SamplingSpec,
    room: asyncio.Semaphore,
    attempts: int,
    prompt: Prompt,
    number: int,
) -> Group:
    """Return the group of a prompt, which is dead if its answers or their rewards failed, as in training."""
    reason = ""
    for _ in range(attempts):
        try:
            async with room:
                return await sampler.group(prompt, number, limits, spec)
        except Exception as error:
            if isinstance(error, EngineError) and not isinstance(error, ResultError):
                raise
            reason = reason_of(error)
    return Group.dead(number, reason, generator_id="eval", version=0)


if __name__ == "__main__":
    serve(_evaluate)
# In the engine's processes, which would otherwise notice a dead parent only when our plugin is loaded.
elif __name__ == "__mp_main__":
    die_with_spawner()
