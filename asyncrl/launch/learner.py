"""The learner's process, one per rank: `python -m asyncrl.launch.learner --config FILE --store URL`."""

import argparse
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from asyncrl import __version__
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
from asyncrl.trainer.checkpoint import CheckpointStore, RunLock
from asyncrl.trainer.collectives import Rendezvous
from asyncrl.trainer.deepspeed import DeepSpeedTrainer
from asyncrl.trainer.objective import Objective
from asyncrl.trainer.plan import PlanSettings, make_plan
from asyncrl.wire.schema import decode_group

log = logging.getLogger(__name__)

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
        head: Head | None,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._buffer = buffer
        self._checkpoints = checkpoints
        self._head = head
        self._probe_ids = probe_ids(config, trainer.vocabulary_size)

    def collect(self, version: int) -> Collected:
        """Rank 0 takes; the others fetch the same groups from the store."""
        ids = b""
        while not ids:
            ids = self._trainer.broadcast(self._head.poll(version, wait_s=POLL_S) if self._head else None)
        if self._head:
            return self._head.collected
        frames = self._buffer.frames(json.loads(ids))
        return Collected(groups=tuple(decode_group(frame, wire_key()) for frame in frames), rejected=(), takes=0)

    def publish(self, version: int) -> None:
        """Every rank takes part in gathering the weights and scoring the probe; rank 0 hands them out."""
        probe = self._trainer.score(self._probe_ids)
        parameters = self._trainer.parameters()
        if self._head:
            self._head.publish(version, parameters, self._probe_ids, probe)
        else:
            for _ in parameters:
                pass

    def report(self, step: Step) -> None:
        """Rank 0 speaks for all: metrics are reduced already."""
        if self._head:
            self._head.report(step)

    def checkpoint(self, version: int, *, last: bool) -> None:
        """Save, and only then let the store forget."""
        if not last and version % self._config.checkpoint.every:
            return
        state = self._head.state(version).to_dict() if self._head else {}
        oldest = self._checkpoints.save(version, self._trainer, state)
        if self._head:
            self._head.commit(LearnerState.from_dict(oldest))


def probe_ids(config: Config, vocabulary_size: int) -> tuple[int, ...]:
    """A fixed random sequence: cheap to score, and every weight takes part."""
    draw = torch.Generator().manual_seed(config.run.seed)
    length = min(config.weights.probe_tokens, config.sampling.max_tokens)
    return tuple(torch.randint(vocabulary_size, (length,), generator=draw).tolist())


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
    rank = int(os.environ.get("RANK", "0"))
    with ExitStack() as stack:
        if config.learner.ranks == 1:
            stack.enter_context(RunLock(directory.lock))
        trainer = DeepSpeedTrainer(
            config.model,
            config.learner,
            temperature=config.sampling.temperature,
            rendezvous=_rendezvous(rank, config),
            reference=config.algorithm.kl.coefficient > 0,
        )
        stack.callback(trainer.close)
        checkpoints = CheckpointStore(directory.checkpoints, keep=config.checkpoint.keep)
        state = LearnerState.from_dict(checkpoints.load(trainer) or {})
        head = stack.enter_context(Head(config, directory, store, trainer, state)) if rank == 0 else None
        run = LearnerRun(config, trainer, train_lane(config, store), checkpoints, head)
        run_learner(
            trainer,
            run,
            Objective.build(config.algorithm),
            _planner(config, trainer),
            version=state.version,
            steps=config.learner.steps,
            epochs=config.batch.epochs,
        )
        if head:
            head.finish()


def _rendezvous(rank: int, config: Config) -> Rendezvous:
    return Rendezvous(
        rank=rank,
        ranks=config.learner.ranks,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=int(os.environ.get("MASTER_PORT", "0")),
    )


def _planner(config: Config, trainer: DeepSpeedTrainer) -> "Planner":
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
            rank=trainer.rank,
            ranks=trainer.ranks,
            device=trainer.device,
        ),
    )
    return lambda collected, version: plan(collected.groups, version)


if __name__ == "__main__":
    main()
