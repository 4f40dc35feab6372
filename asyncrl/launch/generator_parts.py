"""Opens what surrounds a generator's loop."""

from contextlib import ExitStack
from functools import partial

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.lanes import eval_lane, group_limits, train_lane
from asyncrl.config.resolved import wants_greedy
from asyncrl.config.schema import Config
from asyncrl.config.vllm_settings import quantisation
from asyncrl.control.client import ControlClient
from asyncrl.data.prompts import PromptSource, vocabulary_size
from asyncrl.engine.base import Engine, SamplingSpec
from asyncrl.engine.sampler import GroupSampler
from asyncrl.evaluation import Rounds
from asyncrl.generator import Generator, GeneratorSettings, Lane
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.exporter import open_exporter
from asyncrl.telemetry.fanout import Trackers
from asyncrl.telemetry.logs import LogContext
from asyncrl.telemetry.trackers import JsonlTracker
from asyncrl.weights.agreement import Agreement
from asyncrl.weights.staging import HostStaging


def open_generator(
    stack: ExitStack,
    config: Config,
    directory: RunDirectory,
    store: StoreConnection,
    prompts: PromptSource,
    *,
    generator_id: str,
    engine: Engine,
    sampler: GroupSampler,
    control: ControlClient,
    wire_key: bytes,
    logs: LogContext,
) -> Generator:
    """Open the lanes, the trackers and the weights' place; `stack` ends them."""
    exporter = open_exporter(config, generator_id, directory.target(generator_id))
    tracker = Trackers([partial(JsonlTracker, directory.metrics / f"{generator_id}.jsonl")], exporter)
    stack.callback(tracker.close)
    slots = [one.environment.episodes_per_slot for one in config.tasks.values() if one.environment.is_used]
    staging = HostStaging(directory.weights)
    stack.callback(staging.close)
    return Generator(
        engine=engine,
        lanes=lanes(config, store, prompts, vocabulary_size(config.model)),
        sampler=sampler,
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
            most_held=config.generator.max_running * max(slots, default=0),
            lease_s=config.generator.lease_s,
            heartbeat_s=config.control.heartbeat_s,
            wire_key=wire_key,
        ),
        on_version=logs.follow,
    )


def lanes(config: Config, store: StoreConnection, prompts: PromptSource, vocabulary: int) -> list[Lane]:
    """Open the lanes. Evaluation comes first: it is small, and people wait for it."""
    limits, _ = group_limits(config, vocabulary)
    train = Lane(
        name="train",
        buffer=train_lane(config, store),
        prompt=prompts.prompt,
        spec=SamplingSpec.of(config.sampling, config.sampling.temperature),
        limits=limits,
        greedy=wants_greedy(config),
        minimum_version=lambda ticket: ticket.minimum_version,
    )

    def held_out(name: str, rounds: Rounds) -> Lane:
        asked, rows = config.of(config.data.sets[name]), prompts.eval_prompts(rounds.prompts, name)
        return Lane(
            name=rounds.lane,
            buffer=eval_lane(config, store, rounds.lane, rounds.prompts),
            prompt=lambda ticket_id: rows[(ticket_id - 1) % len(rows)],
            spec=SamplingSpec.of(config.sampling, asked.eval.temperature),
            limits=group_limits(asked, vocabulary)[1],
            minimum_version=lambda ticket: rounds.version(ticket.minimum_version),
        )

    rounds = Rounds.of(config, [(len(rows), rows.fingerprint) for rows in prompts.held_out])
    return [*(held_out(*one) for one in rounds.items()), train]
