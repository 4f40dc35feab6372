"""Opens what surrounds a rank's loop, in the order in which the parts begin and end."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from asyncrl.batch.recipe import Recipe
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.run_record import claim_store, key_id
from asyncrl.config.schema import Config
from asyncrl.control.zmq import open_hub
from asyncrl.data.data_files import DataFiles
from asyncrl.launch.learner_runs import LeadRun
from asyncrl.launch.saving import LeadSaving, open_judged, open_pushes
from asyncrl.launch.status_page import open_page
from asyncrl.launch.taking import open_taking
from asyncrl.report.reports import open_reporting
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import RunKeys
from asyncrl.run.saved import LearnerState
from asyncrl.run.starts import record_start
from asyncrl.telemetry.logs import LogContext
from asyncrl.trainer.base import Trainer
from asyncrl.types import Group
from asyncrl.weights.publisher import open_publisher


def open_lead_run(
    stack: ExitStack,
    config: Config,
    directory: RunDirectory,
    store: StoreConnection,
    keys: RunKeys,
    data: DataFiles,
    *,
    state: LearnerState,
    trainer: Trainer,
    checkpoints: CheckpointStore,
    recipe: Recipe,
    probe: Sequence[Sequence[int]],
    initial_logprobs: Sequence[float],
    code: tuple[str, ...],
    logs: LogContext,
    stop: threading.Event,
    fault: Callable[[Group], str | None] | None,
) -> LeadRun:
    """Open all parts of rank 0; the caller enters the run, and `stack` ends the rest.

    Generators join once all else is open: they find the run in its store, and nothing refuses it any more.
    """
    wire_key, record_key = keys.join.wire, keys.join.record
    gpu = torch.cuda.get_device_name() if trainer.device.type == "cuda" else None
    record_start(directory.starts, state.version, gpu, code)
    begun = state.begun(config, rows=data.train)
    reporting = open_reporting(config, directory, key_id=key_id(record_key), step=state.version)
    stack.callback(reporting.close)
    taking = open_taking(
        config, store, data, begun, wire_key=wire_key, step_under_way=directory.step_under_way, fault=fault
    )
    renew = claim_store(config, store, record_key, fresh=state.version == 0)
    publisher = open_publisher(
        config,
        trainer.specs(),
        device=trainer.device.type,
        probe_ids=probe,
        initial_logprobs=initial_logprobs,
        directory=directory.weights,
        history=begun.history,
    )
    judged = open_judged(config, data, checkpoints, directory.checkpoints, begun)
    reporting.watch = judged.see
    saving = LeadSaving(
        checkpoints=checkpoints,
        trainer=trainer,
        every=config.checkpoint.every,
        begun=begun,
        coefficients=recipe.coefficients,
        tracker=recipe.planner.estimator.tracker,
        taking=taking,
        reporting=reporting,
        mark_saved=directory.mark_saved,
        judged=judged,
        is_shared=config.cluster.kind is not None,
        pushes=open_pushes(config, directory.path, stop, state.version),
    )
    hub = open_hub(
        config,
        publisher,
        place=directory.path / "control.sock",
        rows=data.fingerprint,
        code=code,
        wire_key=wire_key,
        keys=keys.control,
        on_dead=taking.revoke,
        on_report=reporting.update,
    )
    page = open_page(config, directory, state.version, hub, taking, renew, reporting)
    return LeadRun(
        trainer=trainer,
        probe=probe,
        logs=logs,
        stop=stop,
        taking=taking,
        publisher=publisher,
        hub=hub,
        reporting=reporting,
        saving=saving,
        page=page,
    )
