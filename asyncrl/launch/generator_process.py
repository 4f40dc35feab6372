"""One generator process: `python -m asyncrl.launch.generator_process --id g0 --store URL --config FILE`."""

import argparse
import asyncio
import logging
import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from asyncrl.buffer.connection import StoreConnection
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.config.sections import GeneratorConfig
from asyncrl.control.base import Hello
from asyncrl.data.prompts import PromptSource
from asyncrl.engine.open import open_engine
from asyncrl.hosting.gpus import resolve_device
from asyncrl.hosting.machine import read_model, this_machine
from asyncrl.hosting.memory_use import generator_kv_bytes
from asyncrl.hosting.processes import die_with_spawner
from asyncrl.hosting.progress import Pace, begin
from asyncrl.hosting.smi import is_installed
from asyncrl.launch.calling import call_learner, hello_of, usable
from asyncrl.launch.generator_parts import open_generator
from asyncrl.launch.players import Players
from asyncrl.launch.roles import join_store, run_role
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import JoinKeys, forget_secrets, join_keys
from asyncrl.telemetry.logs import LogContext, setup_logging

log = logging.getLogger(__name__)


def main() -> None:
    """Parse arguments and generate until the run is over."""
    parser = argparse.ArgumentParser(prog="asyncrl-generator")
    parser.add_argument("--id", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--config", type=Path, required=True)
    # The config came from the store, so the learner must confirm it.
    parser.add_argument("--from-record", action="store_true")
    # The seat on GPUs: which share of their memory is ours, and whether others of the run are on them.
    parser.add_argument("--memory-share", type=float)
    parser.add_argument("--shared-gpu", action="store_true")
    # Where the scorers of this host listen; by default in the run directory.
    parser.add_argument("--scorers", type=Path)
    arguments = parser.parse_args()

    def role() -> None:
        config = load_config(arguments.config)
        # Not the config's run.root: that may be relative to the learner's working directory.
        directory = RunDirectory(arguments.config.parent)
        context = setup_logging(arguments.id, directory.logs, console=True)
        try:
            keys = join_keys(os.environ)
            forget_secrets(os.environ)
            hello = hello_of(config, arguments.id, confirm=arguments.from_record)
            store = join_store(config.store, arguments.store, keys)
            generator = allotted(config, arguments.memory_share, is_shared=arguments.shared_gpu)
            config = config.model_copy(update={"generator": generator})
            scorers = arguments.scorers or directory.path
            asyncio.run(_generate(config, hello, store, keys, directory, scorers, context))
        except asyncio.CancelledError:
            raise SystemExit(128 + signal.SIGTERM) from None

    run_role(role)


async def _generate(
    config: Config,
    hello: Hello,
    store: StoreConnection,
    keys: JoinKeys,
    directory: RunDirectory,
    scorers: Path,
    context: LogContext,
) -> None:
    log.info("reading the prompts")
    prompts = PromptSource.of(config)
    device = resolve_device(config)
    begin("load the model", Pace.SLOW)
    players = Players.of(config, directory.path.parent, scorers)
    log.info("starting the processes of rewards and environment")
    # Before the engine, which takes minutes: a function that cannot be loaded fails within a second.
    await players.start(prompts)
    log.info("starting the engine (%s), which loads the model and warms up", config.generator.engine)
    engine = await open_engine(config.model, config.generator, config.sampling, config.weights, device=device)
    begin("wait for the learner", Pace.SLOW)
    task = asyncio.current_task()
    assert task is not None
    # Cancelled, the generator gives its tickets back.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    control = await call_learner(config.control, store, keys, lambda order: prompts.skip(order.skipped))
    with ExitStack() as stack:
        try:
            generator = open_generator(
                stack,
                config,
                directory,
                store,
                prompts,
                generator_id=hello.generator_id,
                engine=engine,
                sampler=players.sampler(engine, prompts, hello.generator_id),
                control=control,
                wire_key=keys.wire,
                logs=context,
            )
            transports, rows = usable(control.endpoint), prompts.fingerprint
            await generator.run(replace(hello, transports=transports, rows=rows, code=players.code))
        finally:
            await players.close()
            await engine.close()


def allotted(config: Config, memory_share: float | None, *, is_shared: bool) -> GeneratorConfig:
    """Return the settings with the threads and GPU memory that the supervisor allots. Raises DataError."""
    generator = config.generator
    threads = generator.threads or int(os.environ.get("OMP_NUM_THREADS", "1"))
    share = memory_share or generator.gpu_memory_utilization
    allotted: dict[str, float | None] = {"threads": threads, "gpu_memory_utilization": share}
    measures_itself = not is_installed()  # vLLM, although the learner changes the free memory meanwhile
    if is_shared and memory_share is not None and generator.kv_cache_gib is None and not measures_itself:
        most = int(memory_share * min(this_machine(config.learner.device).gpu_bytes))
        shape = read_model(config.model)[1]
        kv_bytes = generator_kv_bytes(shape, config.model, generator, allowed_bytes=most)
        allotted["kv_cache_gib"] = max(kv_bytes, 1) / 2**30
    return generator.model_copy(update=allotted)


if __name__ == "__main__":
    main()
# For the engine's processes, which wait minutes for a dead parent before they load our plugin.
elif __name__ == "__mp_main__":
    die_with_spawner()
