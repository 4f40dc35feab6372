"""`asyncrl eval`: a checkpoint or a model on the held-out prompts, with the engine and rewards of training.

The engine runs in a session of its own. A terminal's Ctrl-C would otherwise reach all processes of vLLM,
which then print tracebacks or wait for one another.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from asyncrl import errors
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, vocabulary_size
from asyncrl.errors import AsyncRLError, RunError
from asyncrl.evaluation import summarise
from asyncrl.launch.environment import PARENT_VARIABLE, WITHOUT_CUDA
from asyncrl.launch.generator_process import resolve_device, sampling_spec
from asyncrl.launch.players import Players
from asyncrl.launch.wiring import group_limits
from asyncrl.processes import die_with_parent, die_with_spawner
from asyncrl.results.export import newest_export
from asyncrl.run.directory import find_run
from asyncrl.supervisor import USER_ERROR
from asyncrl.workers import ending


def evaluate_model(model: str, config_path: Path | None, overrides: Sequence[str]) -> dict[str, float]:
    """Return held-out metrics of a run's newest checkpoint or of a model directory. Raises RunError."""
    if config_path is None:
        if (Path(model) / "config.json").exists() and not (Path(model) / "config.yaml").exists():
            hint = f"name the config with the held-out prompts: asyncrl eval {model} FILE"
            raise RunError(f"{model} is a model, not a run; {hint}")
        directory = find_run(Path(model))
        config_path, model = directory.config, str(newest_export(directory))
    overrides = [*overrides, f"model.path={model}"]
    if load_config(config_path, overrides).data.eval is None:
        raise RunError(f"{config_path}: data.eval is not set; there is nothing to evaluate on")
    with tempfile.NamedTemporaryFile("r", prefix="asyncrl-eval-", suffix=".json", encoding="utf-8") as answer:
        argv = [sys.executable, "-m", "asyncrl.results.evaluate", answer.name, str(config_path), *overrides]
        status = _status_of(argv)
        said = json.loads(answer.read() or "{}")
    if "error" in said:
        raise getattr(errors, said["error"])(said["message"])
    if status != 0:
        raise subprocess.CalledProcessError(status, argv)
    metrics: dict[str, float] = said["metrics"]
    return metrics


def _status_of(argv: Sequence[str]) -> int:
    """Run a process that, with all its children, ends with this one. Raises RunError if it was killed."""
    environment = os.environ | WITHOUT_CUDA | {PARENT_VARIABLE: str(os.getpid())}
    # Libraries print to stdout, which is for the command's own output.
    process = subprocess.Popen(argv, env=environment, stdout=2, start_new_session=True)
    try:
        status = process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status < 0:
        raise RunError(f"the process that evaluates was {ending(status)}; look for lack of memory (dmesg)")
    return status


def main() -> None:
    """Evaluate in this process: the arguments are the file for the answer, the config, and overrides."""
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    answer, config, *overrides = sys.argv[1:]
    said: dict[str, object]
    try:
        said = {"metrics": asyncio.run(_evaluate(load_config(Path(config), overrides)))}
    except AsyncRLError as error:
        said = {"error": type(error).__name__, "message": str(error)}
    Path(answer).write_text(json.dumps(said), encoding="utf-8")
    sys.exit(USER_ERROR if "error" in said else 0)


async def _evaluate(config: Config) -> dict[str, float]:
    from asyncrl.engine.vllm.engine import VLLMEngine

    prompts = PromptSource(config.data, config.model, config.sampling, seed=config.run.seed)
    spec = sampling_spec(config, config.eval.temperature)
    _, limits = group_limits(config, vocabulary_size(config.model))
    players = Players.of(config, config.run.root)
    await players.start(prompts)
    engine = await VLLMEngine.start(
        config.model, config.generator, config.sampling, config.weights, device=resolve_device(config)
    )
    sampler = players.sampler(engine, prompts, "eval")
    numbered = enumerate(prompts.eval_prompts(config.eval.prompts), start=1)
    try:
        groups = await asyncio.gather(
            *(sampler.group(prompt, number, limits, spec) for number, prompt in numbered)
        )
    finally:
        await players.close()
        await engine.close()
    return summarise(groups, version=0).metrics


if __name__ == "__main__":
    main()
# In the engine's processes, which would otherwise notice a dead parent only when our plugin is loaded.
elif __name__ == "__mp_main__":
    die_with_spawner()
