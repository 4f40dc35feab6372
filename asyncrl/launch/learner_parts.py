"""Builds what surrounds rank 0's loop, in the order in which the parts begin and end."""

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from asyncrl.batch.coefficients import Coefficients
from asyncrl.batch.resolve import GREEDY
from asyncrl.buffer.base import LearnerBuffer
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.gate import Gate
from asyncrl.buffer.intake import Intake
from asyncrl.buffer.judge import make_judge
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.run_record import RunRecord, StoredRun, key_id
from asyncrl.buffer.shards import ShardedBuffer, ShardedIntake, ShardGate, ledgers_of
from asyncrl.config import registry
from asyncrl.config.addresses import host_of
from asyncrl.config.resolved import config_hash, config_json, host_digest
from asyncrl.config.schema import Config
from asyncrl.control.membership import RunIdentity
from asyncrl.control.zmq import ControlHub
from asyncrl.data.curriculum import Curriculum
from asyncrl.data.dataset import DataFiles
from asyncrl.data.prompts import load_tokenizer, make_plan, vocabulary_size
from asyncrl.evaluation import Evaluation, resume_ledger
from asyncrl.hosting.placement import choose_transport
from asyncrl.launch.learner_runs import LeadRun
from asyncrl.launch.same_bytes import DecodedFrames
from asyncrl.launch.saving import LeadSaving
from asyncrl.launch.status_page import Show, StatusPage
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.launch.taking import Taking
from asyncrl.launch.wiring import eval_lane, group_limits, open_exporter, train_lane
from asyncrl.lineage import History
from asyncrl.report.reports import Reporting
from asyncrl.report.timeline import Timeline
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import RunKeys
from asyncrl.run.learner_state import LearnerState
from asyncrl.run.starts import record_start
from asyncrl.telemetry.exporter import Exporter, status_families
from asyncrl.telemetry.fanout import open_trackers
from asyncrl.telemetry.logs import LogContext
from asyncrl.telemetry.status import StatusSnapshot, write_status
from asyncrl.trainer.base import Trainer
from asyncrl.types import Group
from asyncrl.version import __version__
from asyncrl.weights.base import Publisher
from asyncrl.weights.layout import Layout
from asyncrl.weights.publisher import SlotPublisher
from asyncrl.wire.decoder import IsolatedDecoder
from asyncrl.wire.group_frames import decode_group

Decode = Callable[[bytes], Group]

# Lineages are drawn: a learner cannot know how many learners died before it without a checkpoint.
MAX_LINEAGE = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """What rank 0 has before the parts here are built."""

    config: Config
    directory: RunDirectory
    store: StoreConnection
    keys: RunKeys
    data: DataFiles
    # From the newest checkpoint, or the beginning of a run.
    state: LearnerState
    trainer: Trainer
    checkpoints: CheckpointStore
    coefficients: Coefficients
    probe_ids: tuple[int, ...]
    # Log-probabilities of the probe under the weights of model.path.
    initial_logprobs: list[float]
    layout: Layout
    logs: LogContext
    stop: threading.Event


def open_lead_run(stack: ExitStack, lead: Lead) -> LeadRun:
    """Build and start all parts; the caller enters the run, and `stack` ends the rest.

    The store is claimed before the control plane opens, so that a generator that joins finds its run there.
    """
    config = lead.config
    gpu = torch.cuda.get_device_name() if lead.trainer.device.type == "cuda" else None
    record_start(lead.directory.starts, lead.state.version, gpu)
    history = lead.state.history.resumed(
        lead.state.version, lineage=secrets.randbelow(MAX_LINEAGE) + 1, longest_lag=config.lag_bound
    )
    begun = replace(lead.state, history=history, fixed=config.fixed_values(rows=lead.data.train))
    exporter = open_exporter(config, lead.directory, "learner")
    reporting = open_reporting(lead, exporter)
    stack.callback(reporting.close)
    taking = open_taking(stack, lead, history)
    renew = claim_store(lead)
    publisher, hub = open_hub(lead, history, taking, reporting)
    saving = LeadSaving(
        checkpoints=lead.checkpoints,
        trainer=lead.trainer,
        every=config.checkpoint.every,
        begun=begun,
        coefficients=lead.coefficients,
        taking=taking,
        reporting=reporting,
        mark_saved=lead.directory.mark_saved,
    )
    shows: list[Show] = [partial(write_status, lead.directory.status)]
    if exporter:
        shows.append(partial(show_to_prometheus, exporter, max_bytes=config.store.max_gib * 2**30))
    page = StatusPage(
        now=first_status(
            config.run.name, lead.state.version, steps=config.learner.steps, lag_bound=config.lag_bound
        ),
        hub=hub,
        taking=taking,
        renew=renew,
        shows=shows,
        guard=reporting.guard,
    )
    return LeadRun(
        trainer=lead.trainer,
        probe_ids=lead.probe_ids,
        logs=lead.logs,
        stop=lead.stop,
        taking=taking,
        publisher=publisher,
        hub=hub,
        reporting=reporting,
        saving=saving,
        page=page,
    )


def open_reporting(lead: Lead, exporter: Exporter | None) -> Reporting:
    """Open trackers, timeline and samples."""
    config = lead.config
    trackers = open_trackers(
        config.telemetry,
        run=config.run.name,
        key_id=key_id(lead.keys.join.record),
        directory=lead.directory.path,
        metrics=lead.directory.metrics / "learner.jsonl",
        samples=lead.directory.samples,
        resolved=config.model_dump(mode="json"),
        step=lead.state.version,
    )
    if exporter:
        trackers.add(exporter)
    return Reporting(
        trackers,
        Timeline(lead.directory.trace if config.telemetry.trace else None),
        partial(load_tokenizer(config.model).decode, skip_special_tokens=True),
        samples_per_step=config.telemetry.samples_per_step,
    )


def open_taking(stack: ExitStack, lead: Lead, history: History) -> Taking:
    """Open both lanes. Raises ConfigError if the number of shards has changed."""
    config = lead.config
    decode: Decode = partial(decode_group, key=lead.keys.join.wire)
    if config.store.isolate_decoding:
        isolated = IsolatedDecoder(lead.keys.join.wire)
        stack.callback(isolated.close)
        decode = isolated.decode
    decoded = DecodedFrames(decode)
    lane = train_lane(config, lead.store)
    deaths = StepDeaths(lead.directory.step_under_way)
    limits, eval_limits = group_limits(config, vocabulary_size(config.model))
    gate = Gate(lane="train", decode=decoded.decode, limits=limits, condemned=deaths.reason)
    intake = open_intake(config, lane, lead.state.ledger, gate, history)
    prompts = min(config.eval.prompts, lead.data.held_out_rows)
    rounds, eval_buffer = eval_lane(config, lead.store, prompts)
    evaluation = Evaluation(
        buffer=eval_buffer,
        ledger=resume_ledger(lead.state.evaluation, rounds, version=lead.state.version),
        gate=Gate(lane=rounds.lane, decode=decode, limits=eval_limits),
        rounds=rounds,
        history=history,
    )
    curriculum = open_curriculum(config, lead.data, lead.state.curriculum)
    return Taking(lane, intake, evaluation, decoded=decoded, deaths=deaths, curriculum=curriculum)


def open_curriculum(config: Config, data: DataFiles, saved: Mapping[str, Any]) -> Curriculum | None:
    """Continue the curriculum from its `saved` state, if the config has one."""
    if config.data.curriculum.floor is None:
        return None
    groups, lag, refills = config.batch.groups, config.staleness.max_lag, config.algorithm.max_refills
    return Curriculum(
        make_plan(config.data, data.train_rows, seed=config.run.seed),
        solved=config.data.curriculum.solved,
        # A step that rejects raises the credit, and so do groups of lost weights that were under way.
        reach=(lag + 1 + refills + lag + 1) * groups,
        window=config.window_groups,
        state=saved,
    )


def open_intake(
    config: Config, lane: RedisBuffer | ShardedBuffer, saved: Mapping[str, Any], gate: Gate, history: History
) -> Intake | ShardedIntake:
    """Continue from the `saved` ledger. Raises ConfigError if the number of shards has changed."""
    shards = config.store.shards
    judge = make_judge(
        [registry.resolve("filter", choice.name, choice.params) for choice in config.algorithm.filters],
        drop_older_than=config.staleness.max_lag if config.staleness.policy == "drop" else config.lag_bound,
        needs_greedy=GREEDY in registry.needs("advantage", config.algorithm.advantage.name),
        history=history,
    )

    def intake(buffer: LearnerBuffer, ledger: Ledger, gate: Gate) -> Intake:
        return Intake(
            buffer=buffer,
            ledger=ledger,
            gate=gate,
            judge=judge,
            groups=config.batch.groups // shards,
            window=config.window_groups // shards,
            max_lag=config.staleness.max_lag,
            # Small shares vary more.
            max_refills=config.algorithm.max_refills * shards,
            stall_s=config.control.stall_s,
            history=history,
        )

    ledgers = ledgers_of(saved, shards)
    if not isinstance(lane, ShardedBuffer):
        return intake(lane, ledgers[0], gate)
    gates = [ShardGate.of(gate, shard, shards) for shard in range(shards)]
    return ShardedIntake(tuple(map(intake, lane.shards, ledgers, gates)))


def claim_store(lead: Lead) -> Callable[[str], None]:
    """Make the store serve this run; return what renews its record with the control plane's endpoint."""
    config = lead.config
    stored = StoredRun(
        name=config.run.name,
        config_json=config_json(config),
        config_hash=config_hash(config),
        release=__version__,
        key_id=key_id(lead.keys.join.record),
    )
    record = RunRecord(lead.store, lead.keys.join.record)
    lead.store.check_room(int(config.store.max_gib * 2**30))
    record.claim(stored, fresh=lead.state.version == 0)
    return lambda endpoint: record.renew(replace(stored, control_endpoint=endpoint))


def open_hub(
    lead: Lead, history: History, taking: Taking, reporting: Reporting
) -> tuple[Publisher, ControlHub]:
    """Open the publisher, and the control plane with its thread, which delivers what is published."""
    config = lead.config
    publisher = SlotPublisher(
        lead.layout,
        device="cpu" if config.weights.slots == "host" else lead.trainer.device.type,
        probe_ids=lead.probe_ids,
        initial_logprobs=lead.initial_logprobs,
        directory=lead.directory.weights,
        deadline_s=config.weights.deadline_s,
        interface=config.control.bind and host_of(config.control.bind),
        history=history,
    )
    hub = ControlHub(
        config.control.bind or f"ipc://{lead.directory.socket_path('control.sock')}",
        publisher,
        config.control,
        RunIdentity(
            release=__version__,
            config_hash=config_hash(config),
            host_digest=host_digest(config),
            rows=lead.data.fingerprint,
        ),
        transport=choose_transport(config.weights.transport, one_host=config.control.bind is None),
        deadline_s=config.weights.deadline_s,
        wire_key=lead.keys.join.wire,
        keys=lead.keys.control,
        on_dead=taking.revoke,
        on_report=reporting.update,
    )
    return publisher, hub


def first_status(run: str, version: int, *, steps: int, lag_bound: int) -> StatusSnapshot:
    """Return the status before the first weights are published."""
    now_at = time.time()
    return StatusSnapshot(
        run=run,
        state="starting",
        step=version,
        total_steps=steps,
        version=version,
        started_at=now_at,
        updated_at=now_at,
        pid=os.getpid(),
        lag_bound=lag_bound,
    )


def show_to_prometheus(exporter: Exporter, status: StatusSnapshot, *, max_bytes: float) -> None:
    """Show every number of `status`, and the limit of the store's bytes."""
    exporter.moved(status.state, status.step, status.audit and status.audit.counters.get("put"))
    exporter.show(status_families(status, max_bytes=max_bytes))
