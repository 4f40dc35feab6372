"""Work with an engine, in a process with a session of its own, for commands of the terminal.

Ctrl-C would otherwise reach all processes of vLLM, which then print tracebacks or wait for one another.
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
from asyncrl.config.sections import GeneratorConfig
from asyncrl.data.prompts import PromptSource
from asyncrl.engine.open import open_engine
from asyncrl.engine.sampler import GroupSampler
from asyncrl.errors import AsyncRLError, DataError, RunError
from asyncrl.hosting.environment import PARENT_VARIABLE, WITHOUT_CUDA
from asyncrl.hosting.gpus import BY_BUS, VARIABLE, count_gpus, has_instances, resolve_device, visible_devices
from asyncrl.hosting.machine import read_model, this_machine
from asyncrl.hosting.memory_use import CONTEXT_BYTES, generator_kv_bytes, sequence_kv_bytes
from asyncrl.hosting.placement import GENERATORS_SHARE, MARGIN
from asyncrl.hosting.processes import die_with_parent, kill_group, module_argv
from asyncrl.hosting.smi import is_installed
from asyncrl.hosting.supervisor import USER_ERROR
from asyncrl.hosting.workers import ending
from asyncrl.launch.players import Players
from asyncrl.launch.scorers import started_scorers
from asyncrl.telemetry.text import data_size


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
    try:
        said: dict[str, object] = {"answer": asyncio.run(work(load_config(Path(config), overrides), *words))}
    except AsyncRLError as error:
        # The nearest of its classes that `ask` finds: some errors are defined elsewhere.
        name = next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
        said = {"error": name, "message": str(error)}
    Path(answer).write_text(json.dumps(said), encoding="utf-8")
    sys.exit(USER_ERROR if "error" in said else 0)


@asynccontextmanager
async def sampler_of(
    config: Config, prompts: PromptSource, name: str, tasks: Container[int]
) -> AsyncIterator[GroupSampler]:
    """Start engine, and the rewards and environments of these tasks, for the body."""
    device = resolve_device(config)
    with started_scorers(config) as directory:
        # The scorers have loaded their models by now, on their own of all GPUs that this process sees.
        gpus, generator = room_on_gpus(config)
        if gpus:
            os.environ[VARIABLE] = visible_devices(gpus)
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


def room_on_gpus(config: Config) -> tuple[list[int], GeneratorConfig]:
    """Return the GPUs with the most free memory, and the settings of an engine that fits there.

    `generator.gpu_memory_utilization` and `kv_cache_gib` are upper limits. On a CPU, and without nvidia-smi,
    there are no GPUs to choose, and the settings are those of the config. Raises DataError if there are too
    few GPUs, they have too little free memory, or nvidia-smi does not answer.
    """
    generator, width = config.generator, config.generator.tensor_parallel
    if resolve_device(config) == "cpu" or not is_installed():
        return [], generator
    if has_instances() and count_gpus() > 1:
        found = f"{count_gpus()} instances of MIG are visible, and nvidia-smi does not say which one is free"
        raise DataError(f"{found}; name one in CUDA_VISIBLE_DEVICES")
    machine = this_machine(config.learner.device)
    used = {gpu: machine.used_by_others(gpu) / total for gpu, total in enumerate(machine.gpu_bytes)}
    gpus = sorted(used, key=used.__getitem__)[:width]
    if len(gpus) < width:
        found = f"generator.tensor_parallel is {width}, and this process sees {len(gpus)} GPUs"
        raise DataError(f"{found}; add generator.tensor_parallel={len(gpus)} to the command")
    fullest, smallest_bytes = gpus[-1], min(machine.gpu_bytes[gpu] for gpu in gpus)
    # vLLM starts only if its whole share is free beside its CUDA context.
    margin = max(MARGIN, CONTEXT_BYTES / smallest_bytes)
    share = min(generator.gpu_memory_utilization or GENERATORS_SHARE, 1 - margin - used[fullest])
    allowed_bytes, shape = int(share * smallest_bytes), read_model(config.model)[1]
    kv_bytes = generator_kv_bytes(shape, config.model, generator, allowed_bytes=allowed_bytes)
    sequence_bytes = sequence_kv_bytes(shape, config)
    if kv_bytes < sequence_bytes:
        needed_bytes = allowed_bytes - kv_bytes + sequence_bytes
        needed = f"the engine needs {data_size(needed_bytes)} of a GPU with the KV cache of one sequence"
        found = f"{data_size(max(allowed_bytes, 0))} of GPU {fullest} may be used"
        raise DataError(f"{needed}, but {found}; end other programs, or add generator.max_running=8")
    kv_gib = min(kv_bytes / 2**30, generator.kv_cache_gib or float("inf"))
    return gpus, generator.model_copy(update={"gpu_memory_utilization": share, "kv_cache_gib": kv_gib})


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
