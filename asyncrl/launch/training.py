"""What a rank of the learner loads, and then trains until the run is over."""

import contextlib
import logging
import signal
import threading
from collections.abc import Collection
from contextlib import ExitStack

import torch

from asyncrl.batch.hooks import Hooks
from asyncrl.batch.resolve import recipe_of
from asyncrl.buffer.connection import StoreConnection
from asyncrl.config.schema import Config
from asyncrl.data.data_files import DataFiles
from asyncrl.hosting.memory_use import gpu_slots
from asyncrl.hosting.progress import Pace, begin
from asyncrl.launch.first_probe import certified_probe, require_right_code
from asyncrl.launch.learner_parts import open_lead_run
from asyncrl.launch.learner_runs import FollowerRun, LeadRun, open_images
from asyncrl.launch.saving import EndedEarly, Saving
from asyncrl.learner import run_learner
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import RunKeys
from asyncrl.run.saved import resume
from asyncrl.telemetry.logs import LogContext
from asyncrl.trainer.base import Trainer
from asyncrl.trainer.collectives import Rendezvous
from asyncrl.trainer.deepspeed.trainer import DeepSpeedTrainer
from asyncrl.trainer.device import naming_memory

log = logging.getLogger(__name__)


def train(
    config: Config,
    directory: RunDirectory,
    store: StoreConnection,
    keys: RunKeys,
    data: DataFiles,
    rendezvous: Rendezvous,
    device: torch.device,
    code: tuple[str, ...],
    logs: LogContext,
) -> None:
    """Load the newest checkpoint, train to the last step or until SIGTERM, and save.

    A SIGTERM before the first step ends this process immediately.
    """
    begin("load the model", Pace.SLOW)
    stop = threading.Event()
    hooks = Hooks.load(config.learner.hooks)
    # What surrounds the loop ends with the error that names the memory, and not with torch's.
    with ExitStack() as stack, naming_memory(config.learner, rendezvous.rank):
        if not directory.saved_mark.exists():
            # Before weights are read. A run that has saved something was judged when it began.
            require_right_code(config)
        log.info("loading the model")
        images = open_images(config)
        share = rendezvous.rank // config.learner.sequence_parallel
        recipe = recipe_of(config, share=share, device=device, row=data.row, images=images)
        trainer = trainer_of(config, recipe.planner.columns, rendezvous, device)
        stack.callback(trainer.close)
        # Before a checkpoint is loaded: every engine, also of a resumed run, starts with model.path, too.
        probe, initial_logprobs = certified_probe(config, trainer)
        checkpoints, state = resume(config, directory, trainer)
        log.info("beginning at step %d", state.version)
        recipe.coefficients.resume(state.coefficients)
        if tracker := recipe.planner.estimator.tracker:
            tracker.resume(state.tracker)
        run: LeadRun | FollowerRun
        if rendezvous.rank == 0:
            lead = open_lead_run(
                stack,
                config,
                directory,
                store,
                keys,
                data,
                state=state,
                trainer=trainer,
                checkpoints=checkpoints,
                recipe=recipe,
                probe=probe,
                initial_logprobs=initial_logprobs,
                code=code,
                logs=logs,
                stop=stop,
                fault=images.fault if images else None,
            )
            run = stack.enter_context(lead)
        else:
            saving = Saving(checkpoints=checkpoints, trainer=trainer, every=config.checkpoint.every)
            run = FollowerRun(trainer=trainer, probe=probe, logs=logs, wire_key=keys.join.wire, saving=saving)
        if state.version:
            run.saving.export(state.version)  # its process may have ended before
        signal.signal(signal.SIGTERM, lambda signum, frame: stop.set())
        with contextlib.suppress(EndedEarly):
            run_learner(trainer, run, recipe, hooks, version=state.version, steps=config.learner.steps)
        run.finish()


def trainer_of(
    config: Config, columns: Collection[str], rendezvous: Rendezvous, device: torch.device
) -> Trainer:
    """Load model.path, with the reference and the critic that the recipe's `columns` need."""
    return DeepSpeedTrainer(
        config.model,
        config.learner,
        temperature=config.sampling.temperature,
        optimizer_steps=config.batch.optimizer_steps,
        device=device,
        rendezvous=rendezvous,
        reference=config.reference if "reference_logprobs_T" in columns and not config.teacher else None,
        critic=config.critic if "values_T" in columns else None,
        slots=gpu_slots(config.weights),
        as_stored=config.generator.engine == "vllm",
    )
