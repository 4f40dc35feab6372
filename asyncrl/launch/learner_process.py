"""One rank of the learner: `python -m asyncrl.launch.learner_process --config FILE --store URL`."""

import logging
import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch

from asyncrl.batch.hooks import Hooks
from asyncrl.batch.plan import PlanSettings
from asyncrl.batch.recipe import Recipe
from asyncrl.batch.resolve import make_recipe
from asyncrl.buffer.connection import StoreConnection
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.config.sections import LearnerConfig, reward_parts
from asyncrl.data.dataset import DataFiles
from asyncrl.data.prompts import vocabulary_size
from asyncrl.errors import MemoryFullError, lacks_gpu_memory
from asyncrl.hosting.gpus import resolve_device
from asyncrl.hosting.memory_use import gpu_slots
from asyncrl.hosting.progress import Pace, begin, doing
from asyncrl.hosting.standby import parse_arguments, wait_until_needed
from asyncrl.launch.learner_parts import Lead, open_lead_run
from asyncrl.launch.learner_runs import FollowerRun, LeadRun
from asyncrl.launch.roles import join_store, run_role
from asyncrl.launch.saving import Saving
from asyncrl.learner import run_learner
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import RunKeys, forget_secrets, run_keys
from asyncrl.run.learner_state import LearnerState
from asyncrl.run.lock import RunLock
from asyncrl.run.saved import read_saved, refuse_changes
from asyncrl.telemetry.logs import LogContext, setup_logging
from asyncrl.trainer.base import Trainer
from asyncrl.trainer.collectives import Rendezvous
from asyncrl.trainer.device import choose_device, limit_memory
from asyncrl.trainer.open import open_trainer
from asyncrl.weights.layout import Layout
from asyncrl.wire.group_frames import decode_group

log = logging.getLogger(__name__)


def draw_probe(seed: int, length: int, vocabulary: int) -> tuple[int, ...]:
    """Draw the token sequence of the probe: random, so that every weight takes part, and always the same."""
    draw = random.Random(seed)
    return tuple(draw.randrange(vocabulary) for _ in range(length))


def main() -> None:
    """Parse arguments, wait if this is a standby, and train."""
    arguments = parse_arguments("asyncrl-learner")

    def role() -> None:
        if arguments.standby:
            os.environ["MASTER_PORT"] = wait_until_needed()
        config = load_config(arguments.config)
        directory, data = RunDirectory(config.run.directory), DataFiles(config.data)
        refuse_changes(config, directory, read_saved(directory), data)
        logs = setup_logging("learner", directory.logs, console=True)
        keys = run_keys(os.environ)
        forget_secrets(os.environ)
        store = join_store(config.store, arguments.store, keys)
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda signum, frame: stop.set())
        rendezvous = rendezvous_of(config, os.environ)
        device = choose_device(config.learner, rendezvous.local_rank, auto=resolve_device(config))
        limit_memory(device, arguments.memory_share)
        # With several ranks, the process that started them holds the lock.
        with RunLock(directory.lock) if config.learner.ranks == 1 else nullcontext():
            train(config, directory, store, keys, data, rendezvous, device, logs, stop)

    run_role(role)


def train(
    config: Config,
    directory: RunDirectory,
    store: StoreConnection,
    keys: RunKeys,
    data: DataFiles,
    rendezvous: Rendezvous,
    device: torch.device,
    logs: LogContext,
    stop: threading.Event,
) -> None:
    """Load the newest checkpoint, train to the last step or until `stop` is set, and save."""
    begin("load the model", Pace.SLOW)
    hooks = Hooks.load(config.learner.hooks)
    with naming_memory(config.learner, rendezvous.rank), ExitStack() as stack:
        log.info("loading the model")
        recipe = recipe_of(config, rendezvous, device)
        trainer = trainer_of(config, recipe, rendezvous, device)
        stack.callback(trainer.close)
        probe_tokens = min(config.weights.probe_tokens, config.sampling.max_tokens - 1)
        probe_ids = draw_probe(config.run.seed, probe_tokens, vocabulary_size(config.model))
        # Before a checkpoint is loaded: every engine, also of a resumed run, starts with model.path, too.
        initial_logprobs = trainer.score(probe_ids)
        checkpoints = CheckpointStore(
            directory.checkpoints, directory.checkpoint_key(), config.checkpoint.keep
        )
        state = LearnerState.from_dict(checkpoints.load(trainer) or {})
        log.info("beginning at step %d", state.version)
        recipe.coefficients.resume(state.coefficients)
        layout = Layout.plan(trainer.specs(), config.weights.bucket_mib << 20)
        run: LeadRun | FollowerRun
        if rendezvous.rank == 0:
            lead = Lead(
                config=config,
                directory=directory,
                store=store,
                keys=keys,
                data=data,
                state=state,
                trainer=trainer,
                checkpoints=checkpoints,
                coefficients=recipe.coefficients,
                probe_ids=probe_ids,
                initial_logprobs=initial_logprobs,
                layout=layout,
                logs=logs,
                stop=stop,
            )
            run = stack.enter_context(open_lead_run(stack, lead))
        else:
            saving = Saving(checkpoints=checkpoints, trainer=trainer, every=config.checkpoint.every)
            decode = partial(decode_group, key=keys.join.wire)
            run = FollowerRun(trainer=trainer, probe_ids=probe_ids, logs=logs, decode=decode, saving=saving)
        run_learner(trainer, run, recipe, hooks, version=state.version, steps=config.learner.steps)
        run.finish()
        begin("end", Pace.SLOW)


@contextmanager
def naming_memory(learner: LearnerConfig, rank: int) -> Iterator[None]:
    """Raise MemoryFullError with the keys to change in place of torch's error, also at the start."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_gpu_memory(error):
            raise
        keys = [f"lower learner.tokens_per_microbatch ({learner.tokens_per_microbatch})"]
        keys += [f"learner.logprob_chunk_tokens ({learner.logprob_chunk_tokens})"]
        if learner.gradient_checkpointing is not True:
            keys += ["set learner.gradient_checkpointing: true"]
        keys += ["give generators on the same GPU a smaller generator.gpu_memory_utilization"]
        if not learner.offload_optimizer:
            keys += ["in a new run set learner.offload_optimizer: true with learner.zero_stage: 3"]
        raise MemoryFullError(
            f"rank {rank} of the learner was at {doing()!r} ({str(error).splitlines()[0]}). The same step "
            f"would need as much again: {', '.join(keys)}; `asyncrl plan` shows what takes how much. Then "
            "`asyncrl up` resumes the run"
        ) from error


def rendezvous_of(config: Config, environment: Mapping[str, str]) -> Rendezvous:
    """Read where the ranks meet from the variables that `asyncrl.launch.ranks` or torchrun has set."""
    return Rendezvous(
        rank=int(environment.get("RANK", "0")),
        ranks=config.learner.ranks,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        address=environment.get("MASTER_ADDR", "127.0.0.1"),
        port=int(environment.get("MASTER_PORT") or "0"),
        # Longer than the supervisor's bound, because the supervisor can name the process that hangs.
        timeout_s=config.control.slow_s + config.control.hang_s,
    )


def recipe_of(config: Config, rendezvous: Rendezvous, device: torch.device) -> Recipe:
    """Resolve what this run optimises, for this rank's share of every batch. Raises ConfigError."""
    settings = PlanSettings(
        max_lag=config.staleness.max_lag,
        mask_stale=config.staleness.policy == "mask",
        mask_truncated=config.algorithm.mask_truncated,
        minibatches=config.batch.minibatches,
        tokens_per_microbatch=config.learner.tokens_per_microbatch,
        share=rendezvous.rank // config.learner.sequence_parallel,
        shares=config.learner.shares,
        device=device,
    )
    return make_recipe(
        config.algorithm,
        config.batch,
        config.critic,
        settings,
        max_response_tokens=config.sampling.max_response_tokens,
        reward_parts=reward_parts(config.reward, config.environment),
    )


def trainer_of(config: Config, recipe: Recipe, rendezvous: Rendezvous, device: torch.device) -> Trainer:
    """Load model.path, with the reference and the critic that the recipe needs."""
    return open_trainer(
        config.model,
        config.learner,
        temperature=config.sampling.temperature,
        optimizer_steps=config.batch.optimizer_steps,
        device=device,
        rendezvous=rendezvous,
        reference="reference_logprobs_T" in recipe.planner.columns,
        critic=config.critic if recipe.critic else None,
        slots=gpu_slots(config.weights),
    )


if __name__ == "__main__":
    main()
