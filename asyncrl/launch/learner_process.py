"""The learner's process, one per rank: `python -m asyncrl.launch.learner_process --config FILE --store URL`."""

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from asyncrl.batch.coefficients import Coefficients
from asyncrl.batch.hooks import Hooks
from asyncrl.batch.plan import PlanSettings
from asyncrl.batch.recipe import Recipe
from asyncrl.batch.resolve import columns_of, make_recipe
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.intake import Collected
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.prompts import vocabulary_size
from asyncrl.errors import CheckpointError
from asyncrl.launch.head import Head
from asyncrl.launch.roles import run_role
from asyncrl.launch.same_bytes import STOP, collect_on_every_rank
from asyncrl.launch.standby import parse_arguments, wait_until_needed
from asyncrl.launch.wiring import join_store, wire_key
from asyncrl.learner import Step, run_learner
from asyncrl.progress import Pace, begin
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from asyncrl.run.learner_state import LearnerState
from asyncrl.run.lock import RunLock
from asyncrl.run.saved import read_saved, refuse_changes
from asyncrl.run.starts import record_start
from asyncrl.telemetry.logs import LogContext, setup_logging
from asyncrl.trainer.deepspeed.collectives import Rendezvous
from asyncrl.trainer.deepspeed.engine_settings import choose_device
from asyncrl.trainer.deepspeed.trainer import DeepSpeedTrainer
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout
from asyncrl.wire.group_frames import decode_group

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Between two signs of life to the other ranks while groups are missing, and between two attempts at the last checkpoint."""
LAST_ATTEMPTS = 60
"""At the last checkpoint: a person may make room, but a run that ends must end."""


class LearnerRun:
    """`learner.Run` on the real store, senders and checkpoints; `head` is there on rank 0 only."""

    def __init__(
        self,
        config: Config,
        trainer: DeepSpeedTrainer,
        checkpoints: CheckpointStore,
        probe_ids: Sequence[int],
        coefficients: Coefficients,
        head: Head | None,
        stop: threading.Event,
        logs: LogContext,
    ) -> None:
        """`stop` is set when somebody asked rank 0 to stop: it saves first."""
        self._config = config
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._probe_ids = probe_ids
        self._coefficients = coefficients
        self._head = head
        self._stop = stop
        self._logs = logs
        self._is_overdue = False
        self._failed_saves = 0

    def collect(self, version: int) -> Collected:
        """The same on every rank. Whoever asked rank 0 to stop has all of them save and end."""
        collected = collect_on_every_rank(
            self._trainer.broadcast, self._head, lambda: self._poll(version), lambda frame: decode_group(frame, wire_key())
        )
        if collected is None:
            self._save_at_last(version)
            raise SystemExit(128 + signal.SIGTERM)
        return collected

    def _poll(self, version: int) -> bytes:
        assert self._head is not None
        return STOP if self._stop.is_set() else self._head.poll(version, wait_s=POLL_S)

    def publish(self, version: int) -> None:
        """Every rank takes part in gathering the weights and scoring the probe; rank 0 hands them out."""
        self._logs.version = version
        probe = self._trainer.score(self._probe_ids)
        parameters = self._trainer.parameters()
        if self._head:
            self._head.publish(version, parameters, probe)
        else:
            for _ in parameters:
                pass

    def report(self, step: Step) -> None:
        """Rank 0 speaks for all: metrics are reduced already."""
        if self._head:
            self._head.report(step)

    def checkpoint(self, version: int, *, last: bool) -> None:
        """Save when it is due, and only then let the store forget.

        A save that fails (a full disk) is due again after the next step; the last one is tried again for a minute.
        """
        if last:
            self._save_at_last(version)
        elif self._is_overdue or version % self._config.checkpoint.every == 0:
            self._is_overdue = not self._try_to_save(version)

    def _save_at_last(self, version: int) -> None:
        begin("last checkpoint", Pace.SLOW)
        for _ in range(LAST_ATTEMPTS):  # counted, not timed: every rank must give up at the same one
            if self._try_to_save(version):
                return
            time.sleep(POLL_S)
        self._save(version)

    def _try_to_save(self, version: int) -> bool:
        try:
            self._save(version)
        except CheckpointError as error:  # the same on every rank
            self._failed_saves += 1
            log.error("step %d is not saved, older checkpoints are as they were; it will be tried again: %s", version, error)
            if self._head:
                self._head.save_failed(self._failed_saves)
            return False
        return True

    def _save(self, version: int) -> None:
        started_s = time.perf_counter()
        state = self._head.state(version, self._coefficients.state()).to_dict() if self._head else {}
        oldest = self._checkpoints.save(version, self._trainer, state)
        if self._head:
            self._head.saved(LearnerState.from_dict(self._checkpoints.state(oldest)), time.perf_counter() - started_s)


def draw_probe(config: Config) -> tuple[int, ...]:
    """A fixed random sequence: cheap to score, and every weight takes part."""
    draw = random.Random(config.run.seed)
    length = min(config.weights.probe_tokens, config.sampling.max_tokens - 1)
    vocabulary = vocabulary_size(config.model)
    return tuple(draw.randrange(vocabulary) for _ in range(length))


def weights_layout(config: Config, trainer: DeepSpeedTrainer) -> Layout:
    """Of the parameters that will be published; every rank takes part in gathering them."""
    specs = [
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in trainer.parameters()
    ]
    return Layout.plan(specs, config.weights.bucket_mib << 20)


def main() -> None:
    """Parse arguments, wait when this is a standby, and train."""
    arguments = parse_arguments("asyncrl-learner")

    def role() -> None:
        if arguments.standby:
            os.environ["MASTER_PORT"] = wait_until_needed()
        config = load_config(arguments.config)
        directory = RunDirectory(config.run.directory)
        refuse_changes(config, directory, read_saved(directory))
        logs = setup_logging("learner", directory.logs, console=True)
        train(config, directory, join_store(config, arguments.store), logs)

    run_role(role)


def train(config: Config, directory: RunDirectory, store: StoreConnection, logs: LogContext) -> None:
    """One rank's whole life."""
    begin("load the model", Pace.SLOW)
    hooks = Hooks.load(config.learner.hooks)
    columns = columns_of(config.algorithm, config.batch)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: stop.set())
    with ExitStack() as stack:
        if config.learner.ranks == 1:  # with more, the process that started them holds it
            stack.enter_context(RunLock(directory.lock))
        rendezvous = _rendezvous(config)
        log.info("loading the model")
        trainer = DeepSpeedTrainer(
            config.model,
            config.learner,
            temperature=config.sampling.temperature,
            rendezvous=rendezvous,
            reference="reference_logprobs_T" in columns,
            critic=config.critic if "values_T" in columns else None,
        )
        stack.callback(trainer.close)
        checkpoints = CheckpointStore(directory.checkpoints, directory.checkpoint_key(), config.checkpoint.keep)
        state = LearnerState.from_dict(checkpoints.load(trainer) or {})
        log.info("beginning at step %d", state.version)
        algorithm = _algorithm(config, rendezvous, state)
        probe, layout = draw_probe(config), weights_layout(config, trainer)
        head = None
        if rendezvous.rank == 0:
            gpu = torch.cuda.get_device_name() if trainer.device.type == "cuda" else None
            record_start(directory.starts, state.version, gpu)
            head = stack.enter_context(
                Head(config, directory, store, state, layout=layout, probe_ids=probe, device=trainer.device.type)
            )
        run = LearnerRun(config, trainer, checkpoints, probe, algorithm.coefficients, head, stop, logs)
        run_learner(trainer, run, algorithm, hooks, version=state.version, steps=config.learner.steps)
        if head:
            begin("last evaluation")
            head.finish()
        begin("end", Pace.SLOW)


def _rendezvous(config: Config) -> Rendezvous:
    return Rendezvous(
        rank=int(os.environ.get("RANK", "0")),
        ranks=config.learner.ranks,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=int(os.environ.get("MASTER_PORT") or "0"),
        # The supervisor, which knows who hangs, comes first; this bound holds where a wait for a slow rank was none.
        timeout_s=config.control.slow_s + config.control.hang_s,
    )


def _algorithm(config: Config, rendezvous: Rendezvous, state: LearnerState) -> Recipe:
    settings = PlanSettings(
        max_lag=config.staleness.max_lag,
        mask_stale=config.staleness.policy == "mask",
        mask_truncated=config.algorithm.mask_truncated,
        minibatches=config.batch.minibatches,
        tokens_per_microbatch=config.learner.tokens_per_microbatch,
        rank=rendezvous.rank,
        ranks=rendezvous.ranks,
        device=choose_device(config.learner, rendezvous.local_rank),
    )
    return make_recipe(
        config.algorithm,
        config.batch,
        config.critic,
        settings,
        max_response_tokens=config.sampling.max_response_tokens,
        reward_parts=[function.part for function in config.reward.functions],
        state=state.coefficients,
    )


if __name__ == "__main__":
    main()
