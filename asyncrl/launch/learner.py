"""The learner's process, one per rank: `python -m asyncrl.launch.learner --config FILE --store URL`."""

import argparse
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from transformers import AutoConfig

from asyncrl.algo import registry
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.intake import Collected
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.launch.directory import RunDirectory
from asyncrl.launch.head import Head, LearnerState
from asyncrl.launch.ranks import run_ranks
from asyncrl.launch.roles import run_role
from asyncrl.launch.wiring import connect_store, train_lane, wire_key
from asyncrl.learner import Step, run_learner
from asyncrl.telemetry.logs import setup_logging
from asyncrl.trainer.checkpoint import CheckpointStore
from asyncrl.trainer.collectives import Rendezvous
from asyncrl.trainer.deepspeed import DeepSpeedTrainer
from asyncrl.trainer.engine_settings import choose_device
from asyncrl.trainer.files import RunLock
from asyncrl.trainer.objective import Objective
from asyncrl.trainer.plan import Plan, PlanSettings, make_plan
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout
from asyncrl.wire.schema import decode_group

log = logging.getLogger(__name__)

STOP = b"stop"
POLL_S = 1.0
"""Between two signs of life to the other ranks while groups are missing."""


class LearnerRun:
    """`learner.Run` on the real store, senders and checkpoints; `head` is there on rank 0 only."""

    def __init__(
        self,
        config: Config,
        trainer: DeepSpeedTrainer,
        buffer: RedisBuffer,
        checkpoints: CheckpointStore,
        probe_ids: Sequence[int],
        head: Head | None,
        stop: threading.Event,
    ) -> None:
        """`stop` is set when somebody asked rank 0 to stop: it saves first."""
        self._config = config
        self._trainer = trainer
        self._buffer = buffer
        self._checkpoints = checkpoints
        self._probe_ids = probe_ids
        self._head = head
        self._stop = stop

    def collect(self, version: int) -> Collected:
        """Rank 0 takes; the others fetch the same groups from the store."""
        message = b""
        while not message:
            message = self._trainer.broadcast(self._poll(self._head, version) if self._head else None)
        if message == STOP:
            self._save(version)
            raise SystemExit(128 + signal.SIGTERM)
        if self._head:
            return self._head.collected
        frames = self._buffer.frames(json.loads(message))
        return Collected(groups=tuple(decode_group(frame, wire_key()) for frame in frames), rejected=(), takes=0)

    def _poll(self, head: Head, version: int) -> bytes:
        return STOP if self._stop.is_set() else head.poll(version, wait_s=POLL_S)

    def publish(self, version: int) -> None:
        """Every rank takes part in gathering the weights and scoring the probe; rank 0 hands them out."""
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
        """Save when it is due, and only then let the store forget."""
        if last or version % self._config.checkpoint.every == 0:
            self._save(version)

    def _save(self, version: int) -> None:
        started_s = time.perf_counter()
        state = self._head.state(version).to_dict() if self._head else {}
        oldest = self._checkpoints.save(version, self._trainer, state)
        if self._head:
            self._head.saved(LearnerState.from_dict(self._checkpoints.state(oldest)), time.perf_counter() - started_s)


def draw_probe(config: Config) -> tuple[int, ...]:
    """A fixed random sequence: cheap to score, and every weight takes part."""
    draw = random.Random(config.run.seed)
    length = min(config.weights.probe_tokens, config.sampling.max_tokens - 1)
    model = AutoConfig.from_pretrained(
        config.model.path, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
    )
    vocabulary = model.get_text_config().vocab_size
    return tuple(draw.randrange(vocabulary) for _ in range(length))


def weights_layout(config: Config, trainer: DeepSpeedTrainer) -> Layout:
    """Of the parameters that will be published; every rank takes part in gathering them."""
    specs = [
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in trainer.parameters()
    ]
    return Layout.plan(specs, config.weights.bucket_mib << 20)


def main() -> None:
    """Parse arguments, start the ranks if there are several, and train."""
    parser = argparse.ArgumentParser(prog="asyncrl-learner")
    parser.add_argument("--store", required=True)
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args()

    def role() -> None:
        config = load_config(arguments.config)
        directory = RunDirectory(config.run.directory)
        setup_logging("learner", directory.logs, console=True)
        if config.learner.ranks > 1 and "RANK" not in os.environ:
            with RunLock(directory.lock):
                sys.exit(run_ranks("asyncrl.launch.learner", sys.argv[1:], config.learner.ranks))
        train(config, directory, connect_store(config, arguments.store))

    run_role(role)


def train(config: Config, directory: RunDirectory, store: StoreConnection) -> None:
    """One rank's whole life."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: stop.set())
    with ExitStack() as stack:
        if config.learner.ranks == 1:  # with more, the process that started them holds it
            stack.enter_context(RunLock(directory.lock))
        rendezvous = _rendezvous(config)
        trainer = DeepSpeedTrainer(
            config.model,
            config.learner,
            temperature=config.sampling.temperature,
            rendezvous=rendezvous,
            reference=config.algorithm.kl.coefficient > 0,
        )
        stack.callback(trainer.close)
        checkpoints = CheckpointStore(directory.checkpoints, directory.secret().encode(), config.checkpoint.keep)
        state = LearnerState.from_dict(checkpoints.load(trainer) or {})
        log.info("beginning at step %d", state.version)
        probe, layout = draw_probe(config), weights_layout(config, trainer)
        head = None
        if rendezvous.rank == 0:
            head = stack.enter_context(
                Head(config, directory, store, state, layout=layout, probe_ids=probe, device=trainer.device.type)
            )
        run_learner(
            trainer,
            LearnerRun(config, trainer, train_lane(config, store), checkpoints, probe, head, stop),
            Objective.build(config.algorithm, config.batch),
            _planner(config, rendezvous),
            version=state.version,
            steps=config.learner.steps,
            epochs=config.batch.epochs,
        )
        if head:
            head.finish()


def _rendezvous(config: Config) -> Rendezvous:
    return Rendezvous(
        rank=int(os.environ.get("RANK", "0")),
        ranks=config.learner.ranks,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=int(os.environ.get("MASTER_PORT", "0")),
    )


def _planner(config: Config, rendezvous: Rendezvous) -> Callable[[Collected, int], Plan]:
    algorithm = config.algorithm
    plan = partial(
        make_plan,
        advantage=registry.resolve("advantage", algorithm.advantage.name, algorithm.advantage.params),
        shaping=[registry.resolve("shaping", choice.name, choice.params) for choice in algorithm.shaping],
        settings=PlanSettings(
            max_lag=config.staleness.max_lag,
            mask_stale=config.staleness.policy == "mask",
            mask_truncated=algorithm.mask_truncated,
            max_response_tokens=config.sampling.max_response_tokens,
            minibatches=config.batch.minibatches,
            tokens_per_microbatch=config.learner.tokens_per_microbatch,
            rank=rendezvous.rank,
            ranks=rendezvous.ranks,
            device=choose_device(config.learner, rendezvous.local_rank),
        ),
    )
    return lambda collected, version: plan(collected.groups, version)


if __name__ == "__main__":
    main()
