"""Work with an engine, in a process with a session of its own, for commands of the terminal.

A terminal's Ctrl-C would otherwise reach all processes of vLLM, which then print tracebacks or wait for one
another.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl import errors
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource
from asyncrl.engine.open import open_engine
from asyncrl.engine.sampler import GroupSampler
from asyncrl.errors import AsyncRLError, RunError
from asyncrl.hosting.environment import PARENT_VARIABLE, WITHOUT_CUDA
from asyncrl.hosting.gpus import BY_BUS, VARIABLE, resolve_device, visible_devices
from asyncrl.hosting.processes import die_with_parent, kill_group, module_argv
from asyncrl.hosting.supervisor import USER_ERROR
from asyncrl.hosting.workers import ending
from asyncrl.launch.players import Players
from asyncrl.launch.scorers import started_scorers
from asyncrl.results.free_gpus import room_on_gpus


def ask(module: str, config: Path, overrides: Sequence[str], *words: str) -> Any:
    """Run a module that calls `serve`, and return its answer. Raises its AsyncRLError, and RunError."""
    with tempfile.NamedTemporaryFile("r", prefix="asyncrl-", suffix=".json", encoding="utf-8") as answer:
        argv = module_argv(module, answer.name, str(len(words)), *words, str(config), *overrides)
        status = _status_of(argv)
        said = json.loads(answer.read() or "{}")
    if "error" in said:
        raise getattr(errors, said["error"])(said["message"])
    if status != 0:
        raise subprocess.CalledProcessError(status, argv)
    return said["answer"]


def serve(work: Callable[..., Coroutine[Any, Any, Any]]) -> None:
    """Write what `work(config, *words)` returns to the file that `ask` has named."""
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    answer, count, *rest = sys.argv[1:]
    words, (config, *overrides) = rest[: int(count)], rest[int(count) :]
    said: dict[str, object]
    try:
        said = {"answer": asyncio.run(work(load_config(Path(config), overrides), *words))}
    except AsyncRLError as error:
        said = {"error": type(error).__name__, "message": str(error)}
    Path(answer).write_text(json.dumps(said), encoding="utf-8")
    sys.exit(USER_ERROR if "error" in said else 0)


@asynccontextmanager
async def sampler_of(
    config: Config, prompts: PromptSource, name: str, tasks: Container[int]
) -> AsyncIterator[GroupSampler]:
    """Start engine, and the rewards and environments of these tasks, for the body."""
    device = resolve_device(config)
    gpus, generator = room_on_gpus(config)
    if gpus:
        os.environ[VARIABLE] = visible_devices(gpus)
    with started_scorers(config) as directory:
        players = Players.of(config, config.run.root, directory, tasks)
        try:
            await players.start(prompts)
            engine = await open_engine(
                config.model, generator, config.sampling, config.weights, device=device
            )
            try:
                yield players.sampler(engine, prompts, name)
            finally:
                await engine.close()
        finally:
            await players.close()


def _status_of(argv: Sequence[str]) -> int:
    """Run a process that, with all its children, ends with this one. Raises RunError if it was killed."""
    environment = BY_BUS | os.environ | WITHOUT_CUDA | {PARENT_VARIABLE: str(os.getpid())}
    # Libraries print to stdout, which is for the command's own output.
    process = subprocess.Popen(argv, env=environment, stdout=2, start_new_session=True)
    try:
        status = process.wait()
    finally:
        kill_group(process.pid)
        process.wait()
    if status < 0:
        raise RunError(f"the process with the engine was {ending(status)}; look for lack of memory (dmesg)")
    return status
