"""What only the learner's rank 0 does: the buffer, the senders, the control plane, evaluation, telemetry."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from asyncrl import __version__
from asyncrl.algo import registry
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.intake import Collected, Intake, make_judge
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.run_record import RunRecord, StoredRun
from asyncrl.config.resolved import config_hash, config_json
from asyncrl.config.schema import Config
from asyncrl.control.zmq import ControlHub
from asyncrl.data.dataset import load_rows
from asyncrl.data.prompts import load_tokenizer
from asyncrl.errors import AsyncRLError
from asyncrl.evaluation import EvalResult, Evaluation
from asyncrl.launch.directory import RunDirectory
from asyncrl.launch.report import eval_records, sample_records, step_metrics
from asyncrl.launch.wiring import eval_lane, key_id, train_lane, wire_key
from asyncrl.learner import Step
from asyncrl.telemetry.fanout import open_trackers
from asyncrl.telemetry.status import StatusSnapshot, write_status
from asyncrl.weights.layout import Layout
from asyncrl.weights.publisher import SharedMemoryPublisher
from asyncrl.wire.schema import decode_group

log = logging.getLogger(__name__)

LAST_EVAL_S = 300.0
"""Longest wait for the evaluation of the final weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """What a checkpoint holds besides the trainer's own: enough to go on as if nothing had happened."""

    version: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    eval_ledger: Ledger = field(default_factory=Ledger)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint's JSON."""
        return {"version": self.version, "ledger": self.ledger.to_dict(), "eval_ledger": self.eval_ledger.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; an empty dict is the beginning."""
        if not values:
            return cls()
        return cls(
            version=values["version"],
            ledger=Ledger.from_dict(values["ledger"]),
            eval_ledger=Ledger.from_dict(values["eval_ledger"]),
        )


class Head:
    """Rank 0's surroundings. A context manager: leaving it stops senders, control plane and trackers."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        store: StoreConnection,
        state: LearnerState,
        *,
        layout: Layout,
        probe_ids: Sequence[int],
    ) -> None:
        self._config = config
        self._store = store
        self.version = state.version
        self._phase = "starting"
        self._message = ""
        self._started_at = time.time()
        self._is_recovered = False
        self._collected: Collected | None = None
        self._decode_text = partial(load_tokenizer(config.model).decode, skip_special_tokens=True)
        self._intake = self._make_intake(state.ledger)
        self._evaluation = self._make_evaluation(state.eval_ledger)
        self._publisher = SharedMemoryPublisher(
            layout,
            probe_ids=probe_ids,
            directory=directory.weights,
            deadline_s=config.weights.deadline_s,
            interface=interface_of(config.control.bind),
        )
        self._trackers = open_trackers(
            config.telemetry,
            run=config.run.name,
            directory=directory.path,
            metrics=directory.metrics / "learner.jsonl",
            samples=directory.samples,
            resolved=config.model_dump(mode="json"),
        )
        self._endpoint = config.control.bind or f"ipc://{directory.socket_path('control.sock')}"
        self._status = StatusWriter(directory.status, self.snapshot)

    def __enter__(self) -> Self:
        config, record = self._config, RunRecord(self._store)
        hash_ = config_hash(config)
        run = StoredRun(
            name=config.run.name,
            config_json=config_json(config),
            config_hash=hash_,
            release=__version__,
            key_id=key_id(wire_key()),
        )
        record.claim(run, fresh=self.version == 0)
        self._hub = ControlHub(
            self._endpoint,
            self._publisher,
            config.control,
            transport=resolve_transport(config.weights.transport),
            deadline_s=config.weights.deadline_s,
            release=__version__,
            config_hash=hash_,
            wire_key=wire_key(),
            on_dead=self._revoke,
        )
        record.set_control_endpoint(self._hub.endpoint)
        self._status.start()
        return self

    def _revoke(self, holder: str) -> None:
        """What a dead generator held is issued again at once, not when its leases run out."""
        for lane in (self._intake.buffer, self._evaluation.buffer):
            if count := lane.revoke(holder):
                log.info("%d tickets of %s are issued again", count, holder)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, SystemExit):  # SIGTERM
            self._phase, self._message = "stopped", "asked to stop"
        elif error is not None:
            self._phase, self._message = "failed", str(error)
        self._status.close()
        self._hub.stop(self._message or "the learner ends")
        self._publisher.close()
        self._trackers.close()

    def _make_intake(self, ledger: Ledger) -> Intake:
        config = self._config
        filters = [registry.resolve("filter", choice.name, choice.params) for choice in config.algorithm.filters]
        return Intake(
            buffer=train_lane(config, self._store),
            ledger=ledger,
            decode=partial(decode_group, key=wire_key()),
            judge=make_judge(filters, drop_older_than=config.staleness.max_lag if config.staleness.policy == "drop" else None),
            groups=config.batch.groups,
            window=config.window_groups,
            max_lag=config.staleness.max_lag,
            max_refills=config.algorithm.max_refills,
            stall_s=config.control.stall_s,
        )

    def _make_evaluation(self, ledger: Ledger) -> Evaluation:
        config = self._config
        held_out = len(load_rows(config.data.eval, config.data.eval_split)) if config.data.eval else 0
        prompts = min(config.eval.prompts, held_out)
        return Evaluation(
            buffer=eval_lane(config, self._store, prompts),
            ledger=ledger,
            decode=partial(decode_group, key=wire_key()),
            prompts=prompts,
            every=config.eval.every,
            steps=config.learner.steps,
        )

    # --- what the loop asks for ------------------------------------------------------------------------------------

    @property
    def collected(self) -> Collected:
        """What the last successful `poll` found."""
        assert self._collected is not None
        return self._collected

    def poll(self, version: int, *, wait_s: float) -> bytes:
        """JSON list of the ids of the next step's groups; empty while they are not all there."""
        self._log_evaluation(self._evaluation.poll())
        self._collected = self._intake.poll(version, wait_s=wait_s)
        if self._collected is None:
            return b""
        return json.dumps([group.ticket_id for group in self._collected.groups]).encode()

    def publish(self, version: int, parameters: Iterable[tuple[str, Tensor]], probe_logprobs: Sequence[float]) -> None:
        """New weights first, then the credit for the groups that they will sample."""
        self._phase = "training"
        self._publisher.publish(version, parameters, probe_logprobs)
        self._hub.announce(version)
        self.version = version
        if self._is_recovered:
            self._intake.open(version)
            self._evaluation.open(version)
        else:
            self._intake.recover(version)
            self._evaluation.recover(version)
            self._is_recovered = True

    def report(self, step: Step) -> None:
        """Metrics and samples of a finished step."""
        counters = {f"weights/{name}": value for name, value in self._hub.counters().items()}
        self._trackers.log(step_metrics(step) | counters, step=step.version)
        self._trackers.samples(sample_records(step, self._decode_text, self._config.telemetry.samples_per_step))
        self._log_evaluation(self._evaluation.poll())

    def state(self, version: int) -> LearnerState:
        """What the next checkpoint must hold."""
        return LearnerState(version=version, ledger=self._intake.ledger, eval_ledger=self._evaluation.ledger)

    def saved(self, oldest: LearnerState, seconds: float) -> None:
        """A checkpoint is durable: let the store forget what the oldest kept one holds."""
        self._trackers.log({"time/checkpoint": seconds}, step=self.version)
        self._intake.commit(oldest.ledger.takes, oldest.ledger.chain, self.version)

    def finish(self) -> None:
        """Wait for the evaluation of the final weights, then send everybody home."""
        self._phase = "evaluating"
        self._log_evaluation(self._evaluation.wait(LAST_EVAL_S))
        self._intake.buffer.close()
        self._phase, self._message = "finished", "the training is done"

    def _log_evaluation(self, results: Sequence[EvalResult]) -> None:
        for result in results:
            self._trackers.log(result.metrics, step=result.version)
            self._trackers.samples(eval_records(result.groups, result.version, self._decode_text, count=4))

    # --- being seen ------------------------------------------------------------------------------------------------

    def snapshot(self) -> StatusSnapshot:
        """One moment of the run, for the dashboard and `asyncrl status`."""
        return StatusSnapshot(
            run=self._config.run.name,
            state=self._phase,
            step=self.version,
            total_steps=self._config.learner.steps,
            version=self.version,
            started_at=self._started_at,
            updated_at=time.time(),
            pid=os.getpid(),
            lag_bound=self._config.lag_bound,
            members=tuple(self._hub.members()),
            audit=self._intake.buffer.audit(),
            counters=self._hub.counters(),
            message=self._message,
        )


class StatusWriter:
    """Writes what `snapshot` returns, once a second, from a thread of its own: also while the learner waits or steps."""

    def __init__(self, path: Path, snapshot: Callable[[], StatusSnapshot]) -> None:
        self._path = path
        self._snapshot = snapshot
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asyncrl-status", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Write once more and end."""
        self._stop.set()
        self._thread.join(timeout=10.0)
        self._write()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            self._write()

    def _write(self) -> None:
        try:
            write_status(self._path, self._snapshot())
        except (AsyncRLError, OSError) as error:
            log.warning("status.json could not be written this time: %s", error)


def resolve_transport(wanted: str) -> str:
    """`auto` is NCCL where this machine has GPUs, else Gloo."""
    return ("nccl" if torch.cuda.is_available() else "gloo") if wanted == "auto" else wanted


def interface_of(bind: str | None) -> str | None:
    """The address that generators on other hosts reach; None when all are on this host."""
    return None if bind is None else bind.removeprefix("tcp://").rpartition(":")[0]
