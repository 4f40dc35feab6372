"""One generator process: `python -m asyncrl.launch.generator_process --id g0 --store URL --config FILE`."""

import argparse
import asyncio
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.run_record import RunRecord
from asyncrl.config.load import load_config
from asyncrl.config.resolved import config_hash, host_digest, wants_greedy
from asyncrl.config.schema import Config
from asyncrl.config.sections import ControlConfig, GeneratorConfig
from asyncrl.config.vllm_settings import quantisation
from asyncrl.control.base import Hello
from asyncrl.control.client import ControlClient
from asyncrl.data.prompts import PromptSource, vocabulary_size
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.open import open_engine
from asyncrl.errors import ControlError, StoreError
from asyncrl.generator import Generator, GeneratorSettings, Lane
from asyncrl.hosting.gpus import resolve_device
from asyncrl.hosting.machine import read_shape, this_machine
from asyncrl.hosting.memory_use import generator_kv_bytes
from asyncrl.hosting.processes import closed_to_us, die_with_spawner
from asyncrl.hosting.progress import Pace, begin
from asyncrl.hosting.smi import is_installed
from asyncrl.launch.players import Players
from asyncrl.launch.roles import join_store, run_role
from asyncrl.launch.wiring import eval_lane, group_limits, open_exporter, train_lane
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import JoinKeys, forget_secrets, join_keys
from asyncrl.telemetry.alarms import Alarms
from asyncrl.telemetry.fanout import Trackers
from asyncrl.telemetry.jsonl import JsonlTracker
from asyncrl.telemetry.logs import LogContext, setup_logging
from asyncrl.version import __version__
from asyncrl.weights.agreement import Agreement
from asyncrl.weights.base import TRANSPORTS, UpdateOrder
from asyncrl.weights.staging import HostStaging

log = logging.getLogger(__name__)

# Longest wait for a learner that loads a large model.
LEARNER_START_S = 600.0


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
    arguments = parser.parse_args()

    def role() -> None:
        config = load_config(arguments.config)
        # Not the config's run.root: that may be relative to the learner's working directory.
        directory = RunDirectory(arguments.config.parent)
        context = setup_logging(arguments.id, directory.logs, console=True)
        try:
            keys = join_keys(os.environ)
            forget_secrets(os.environ)
            hello = _hello(config, arguments.id, confirm=arguments.from_record)
            store = join_store(config.store, arguments.store, keys)
            generator = allotted(config, arguments.memory_share, is_shared=arguments.shared_gpu)
            config = config.model_copy(update={"generator": generator})
            asyncio.run(_generate(config, hello, store, keys, directory, context))
        except asyncio.CancelledError:
            raise SystemExit(128 + signal.SIGTERM) from None

    run_role(role)


async def _generate(
    config: Config,
    hello: Hello,
    store: StoreConnection,
    keys: JoinKeys,
    directory: RunDirectory,
    context: LogContext,
) -> None:
    log.info("reading the prompts")
    prompts = PromptSource(config.data, config.model, config.sampling, seed=config.run.seed)
    device = resolve_device(config)
    begin("load the model", Pace.SLOW)
    players = Players.of(config, directory.path.parent)
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
    control = await _call_learner(config.control, store, keys, lambda order: prompts.skip(order.skipped))
    tracker = generator_trackers(config, directory, hello.generator_id)
    staging = HostStaging(directory.weights)
    try:
        await Generator(
            engine=engine,
            lanes=lanes(config, store, prompts, vocabulary_size(config.model)),
            sampler=players.sampler(engine, prompts, hello.generator_id),
            staging=staging,
            control=control,
            tracker=tracker,
            agreement=Agreement(
                limit=config.weights.probe_limit,
                dtype=config.model.dtype,
                quantisation=quantisation(config.generator, config.model.dtype),
            ),
            settings=GeneratorSettings(
                max_running=config.generator.max_running,
                most_held=config.generator.max_running * config.environment.episodes_per_slot,
                lease_s=config.generator.lease_s,
                heartbeat_s=config.control.heartbeat_s,
                wire_key=keys.wire,
            ),
            on_version=context.follow,
        ).run(
            replace(
                hello,
                transports=usable(TRANSPORTS, control.endpoint),
                rows=prompts.fingerprint,
            )
        )
    finally:
        await players.close()
        await engine.close()
        staging.close()
        tracker.close()


async def _call_learner(
    config: ControlConfig, store: StoreConnection, keys: JoinKeys, on_order: Callable[[UpdateOrder], None]
) -> ControlClient:
    log.info("calling the learner")
    record = RunRecord(store, keys.record)
    return ControlClient(
        await _control_endpoint(store, record),
        find_learner=partial(_endpoint_now, record),
        heartbeat_s=config.heartbeat_s,
        timeout_s=config.timeout_s,
        wire_key=keys.wire,
        keys=keys.control,
        on_order=on_order,
    )


def usable(transports: tuple[str, ...], endpoint: str) -> tuple[str, ...]:
    """Leave out what needs the learner's memory or its network, if this process can have neither."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint:  # another host, perhaps
        return transports
    try:
        obstacle = closed_to_us(Path(path))
    except OSError as error:
        log.warning("whether the learner's memory can be read is not known: %s", error)
        return transports
    if not obstacle:
        return transports
    log.warning(
        "this generator cannot read the learner's memory, because %s, so weights come over files, which is "
        "slower; start both in one container and as one user, or set control.bind",
        obstacle,
    )
    return tuple(name for name in transports if name not in ("slot", "tcp", "nccl"))


def generator_trackers(config: Config, directory: RunDirectory, generator_id: str) -> Trackers:
    """Open JSONL, and Prometheus if configured; W&B and the like get one run, from the learner."""
    trackers = Trackers(
        [lambda: JsonlTracker(directory.metrics / f"{generator_id}.jsonl")],
        Alarms(),
    )
    if exporter := open_exporter(config, directory, generator_id):
        trackers.add(exporter)
    return trackers


async def _endpoint_now(record: RunRecord) -> str:
    """Return the learner's endpoint; empty if the store does not answer."""
    try:
        return (await asyncio.to_thread(record.read)).control_endpoint
    except StoreError as error:
        log.warning("the learner's endpoint cannot be read: %s", error)
        return ""


async def _control_endpoint(store: StoreConnection, record: RunRecord) -> str:
    """Wait for the learner's endpoint. While the learner loads, the record may be missing or an older one."""
    until_s, logged = time.monotonic() + LEARNER_START_S, ""
    while True:
        found = "no learner has recorded its endpoint"
        try:
            if endpoint := (await asyncio.to_thread(record.read)).control_endpoint:
                return endpoint
        except StoreError as error:
            found = str(error)
        if time.monotonic() > until_s:
            raise ControlError(
                f"store {store.url}: {LEARNER_START_S:.0f} s without a learner; start it. Last: {found}"
            )
        if found != logged:
            logged = found
            log.info("waiting for the learner: %s", found)
        await asyncio.sleep(0.2)


def lanes(config: Config, store: StoreConnection, prompts: PromptSource, vocabulary: int) -> list[Lane]:
    """Open the lanes. Evaluation comes first: it is small, and people wait for it."""
    held_out = prompts.eval_prompts(config.eval.prompts)
    limits, eval_limits = group_limits(config, vocabulary)
    train = Lane(
        name="train",
        buffer=train_lane(config, store),
        prompt=prompts.prompt,
        spec=sampling_spec(config, config.sampling.temperature),
        limits=limits,
        greedy=wants_greedy(config),
        minimum_version=lambda ticket: ticket.minimum_version,
    )
    if not held_out:
        return [train]
    rounds, eval_buffer = eval_lane(config, store, len(held_out))
    evaluation = Lane(
        name=rounds.lane,
        buffer=eval_buffer,
        prompt=lambda ticket_id: held_out[(ticket_id - 1) % len(held_out)],
        spec=sampling_spec(config, config.eval.temperature),
        limits=eval_limits,
        minimum_version=lambda ticket: rounds.version(ticket.minimum_version),
    )
    return [evaluation, train]


def sampling_spec(config: Config, temperature: float) -> SamplingSpec:
    """Return how a lane samples."""
    return SamplingSpec(
        temperature=temperature,
        max_response_tokens=config.sampling.max_response_tokens,
        stop=config.sampling.stop,
    )


def allotted(config: Config, memory_share: float | None, *, is_shared: bool) -> GeneratorConfig:
    """Return the settings with the threads and GPU memory that the supervisor allots. Raises DataError."""
    generator = config.generator
    allotted: dict[str, float | None] = {
        "threads": generator.threads or int(os.environ.get("OMP_NUM_THREADS", "1")),
        "gpu_memory_utilization": memory_share or generator.gpu_memory_utilization,
    }
    measures_itself = not is_installed()  # vLLM, although the learner changes the free memory meanwhile
    if is_shared and memory_share is not None and generator.kv_cache_gib is None and not measures_itself:
        kv_bytes = generator_kv_bytes(
            read_shape(config.model),
            config.model,
            generator,
            allowed_bytes=int(memory_share * min(this_machine(config.learner.device).gpu_bytes)),
        )
        allotted["kv_cache_gib"] = max(kv_bytes, 1) / 2**30
    return generator.model_copy(update=allotted)


def _hello(config: Config, generator_id: str, *, confirm: bool) -> Hello:
    """Return the message that joins; with `confirm` the learner must have the same code and environment."""
    return Hello(
        generator_id=generator_id,
        incarnation=uuid.uuid4().hex[:12],
        release=__version__,
        config_hash=config_hash(config),
        version=0,
        tensor_parallel=config.generator.tensor_parallel,
        pid=os.getpid(),
        host=socket.gethostname(),
        host_digest=host_digest(config) if confirm else "",
    )


if __name__ == "__main__":
    main()
# For the engine's processes, which wait minutes for a dead parent before they load our plugin.
elif __name__ == "__mp_main__":
    die_with_spawner()
