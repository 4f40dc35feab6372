"""What only the learner's rank 0 does: the buffer, the senders, the control plane, evaluation, telemetry."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from torch import Tensor

from asyncrl import __version__
from asyncrl.best_effort import BestEffort
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.intake import Collected
from asyncrl.buffer.run_record import RunRecord, StoredRun, key_id
from asyncrl.buffer.watch import AuditWatch
from asyncrl.config.resolved import config_hash, config_json, host_digest
from asyncrl.config.schema import Config
from asyncrl.control.zmq import ControlHub
from asyncrl.data.dataset import fingerprints
from asyncrl.data.prompts import load_tokenizer, vocabulary_size
from asyncrl.launch.learner_parts import held_out_rows, open_evaluation, open_intake
from asyncrl.launch.roles import NOT_MENDED_BY_A_RESTART
from asyncrl.launch.same_bytes import DecodedFrames
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.launch.wiring import open_exporter, train_lane, wire_key
from asyncrl.learner import Step
from asyncrl.report.reports import Reports
from asyncrl.report.timeline import Timeline
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import join_keys, run_keys
from asyncrl.run.learner_state import LearnerState
from asyncrl.run.saved import values_to_keep
from asyncrl.telemetry.exporter import status_families
from asyncrl.telemetry.fanout import open_trackers
from asyncrl.telemetry.status import StatusSnapshot, write_status
from asyncrl.weights.base import choose_transport
from asyncrl.weights.layout import Layout
from asyncrl.weights.publisher import SharedMemoryPublisher
from asyncrl.wire.decoder import IsolatedDecoder
from asyncrl.wire.group_frames import decode_group

log = logging.getLogger(__name__)

MAX_LINEAGE = (1 << 32) - 1
"""They are drawn: a learner cannot know how many died before it without a checkpoint."""
LAST_EVAL_S = 300.0
"""Longest wait for the evaluation of the final weights."""


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
        device: str,
    ) -> None:
        """`device` is the learner's kind: cpu or cuda."""
        self._config = config
        self._fixed = values_to_keep(config)
        held_out = held_out_rows(config)
        self._rows = fingerprints(self._fixed["data.train"], held_out)
        self._mark_saved = directory.mark_saved
        self._store = store
        self._device = device
        self.version = state.version
        self._phase = "starting"
        self._message = ""
        self._started_at = time.time()
        self._history = state.history.resumed(
            state.version, lineage=secrets.randbelow(MAX_LINEAGE) + 1, longest_lag=config.lag_bound
        )
        self._is_recovered = False
        self.frames: list[bytes] = []
        """Of the groups that the last successful `poll` found."""
        self._rounds = 0
        self._collected: Collected | None = None
        self._isolated = IsolatedDecoder(wire_key()) if config.store.isolate_decoding else None
        decode = self._isolated.decode if self._isolated else partial(decode_group, key=wire_key())
        self._decoded = DecodedFrames(decode)
        self._lane = train_lane(config, store)
        vocabulary, history = vocabulary_size(config.model), self._history
        self._deaths = StepDeaths(directory.step_under_way)
        self._intake = open_intake(
            config,
            self._lane,
            state.ledgers,
            self._decoded.decode,
            condemned=self._deaths.reason,
            vocabulary=vocabulary,
            history=history,
        )
        self._watch = AuditWatch("training", self._lane.audit)
        self._evaluation = open_evaluation(config, store, state, decode, vocabulary=vocabulary, history=history)
        self._eval_watch = AuditWatch("evaluation", self._evaluation.buffer.audit)
        self._publisher = SharedMemoryPublisher(
            layout,
            probe_ids=probe_ids,
            directory=directory.weights,
            deadline_s=config.weights.deadline_s,
            interface=interface_of(config.control.bind),
            history=self._history,
        )
        trackers = open_trackers(
            config.telemetry,
            run=config.run.name,
            key_id=key_id(join_keys().record),
            directory=directory.path,
            metrics=directory.metrics / "learner.jsonl",
            samples=directory.samples,
            resolved=config.model_dump(mode="json"),
            step=state.version,
        )
        self._exporter = open_exporter(config, directory, "learner")
        if self._exporter:
            trackers.add(self._exporter)
        self._reports = Reports(
            trackers,
            Timeline(directory.trace if config.telemetry.trace else None),
            partial(load_tokenizer(config.model).decode, skip_special_tokens=True),
            samples_per_step=config.telemetry.samples_per_step,
        )
        self._endpoint = config.control.bind or f"ipc://{directory.socket_path('control.sock')}"
        self._status_path = directory.status
        self._ticker = Ticker(self._tick, self._reports.guard)

    def __enter__(self) -> Self:
        config, self._record = self._config, RunRecord(self._store, join_keys().record)
        hash_ = config_hash(config)
        self._run = StoredRun(
            name=config.run.name,
            config_json=config_json(config),
            config_hash=hash_,
            release=__version__,
            key_id=key_id(join_keys().record),
        )
        self._store.check_room(int(config.store.max_gib * 2**30))
        self._record.claim(self._run, fresh=self.version == 0)
        self._hub = ControlHub(
            self._endpoint,
            self._publisher,
            config.control,
            transport=choose_transport(config.weights.transport, device=self._device),
            deadline_s=config.weights.deadline_s,
            release=__version__,
            config_hash=hash_,
            host_digest=host_digest(config),
            rows=self._rows,
            wire_key=wire_key(),
            keys=run_keys().control,
            on_dead=self._revoke,
            on_report=self._reports.update,
        )
        self._ticker.start()
        return self

    def _tick(self) -> None:
        """Once a second: status for people and for Prometheus; and the record again, should the store have been wiped."""
        self._record.renew(replace(self._run, control_endpoint=self._hub.endpoint))
        status = self._snapshot()
        write_status(self._status_path, status)
        if self._exporter:
            self._exporter.moved(status.state, status.step, status.audit and status.audit.counters.get("put"))
            max_bytes, probe_limit = self._config.store.max_gib * 2**30, self._config.weights.probe_limit
            self._exporter.show(status_families(status, max_bytes=max_bytes, probe_limit=probe_limit))

    def _revoke(self, holder: str) -> None:
        """What a dead generator held is issued again at once, not when its leases run out."""
        for lane in (self._lane, self._evaluation.buffer):
            if count := lane.revoke(holder):
                log.info("%d tickets of %s are issued again", count, holder)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, SystemExit):
            self._phase, self._message = "stopped", "asked to stop"
        elif error is not None:
            self._phase, self._message = "failed", str(error)
        self._ticker.close()
        # After an error that a restart may mend, the generators wait for the next learner.
        is_over = error is None or isinstance(error, (SystemExit, *NOT_MENDED_BY_A_RESTART))
        self._hub.stop(self._message, farewell=is_over)
        self._publisher.close()
        if self._isolated:
            self._isolated.close()
        self._reports.close()

    # --- what the loop asks for ------------------------------------------------------------------------------------

    @property
    def collected(self) -> Collected:
        """What the last successful `poll` found."""
        assert self._collected is not None
        return self._collected

    def is_in_touch(self) -> bool:
        """Whether the control plane has done something since the last call: without it no weights arrive anywhere."""
        before, self._rounds = self._rounds, self._hub.rounds
        return self._rounds != before

    def poll(self, version: int, *, wait_s: float) -> bytes:
        """How many groups the next step has; empty while they are not all there."""
        self._hub.check()
        self._heal(version)
        self._reports.evaluation(self._evaluation.poll())
        self._collected = self._intake.poll(version, wait_s=wait_s)
        if self._collected is None:
            return b""
        self.frames = self._decoded.of_step(self._collected.groups)
        self._deaths.begin(version, self.frames)
        return b"%d" % len(self.frames)

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

    def _heal(self, version: int) -> None:
        """Where issued ids are missing or in two places: make the store agree with the ledger."""
        if self._watch.is_recovery_due():
            self._intake.recover(version)
        if self._eval_watch.is_recovery_due():
            self._evaluation.recover(version)

    @property
    def _mismatch(self) -> int:
        return max(self._watch.mismatch, self._eval_watch.mismatch, key=abs)

    def report(self, step: Step) -> None:
        """Metrics and samples of a finished step."""
        counters = {f"weights/{name}": value for name, value in self._hub.counters().items()}
        counters["buffer/audit_mismatch"] = self._mismatch
        counters["buffer/recoveries"] = self._watch.recoveries + self._eval_watch.recoveries
        self._reports.step(step, counters)
        self._deaths.end(step.version - 1)
        self._reports.evaluation(self._evaluation.poll())

    def state(self, version: int, coefficients: dict[str, float]) -> LearnerState:
        """What the next checkpoint must hold."""
        return LearnerState(
            version=version,
            ledgers=self._intake.settled,
            history=self._history,
            evaluation=self._evaluation.state(),
            fixed=self._fixed,
            coefficients=coefficients,
        )

    def saved(self, oldest: LearnerState, seconds: float) -> None:
        """A checkpoint is durable: let the store forget what the oldest kept one holds."""
        with self._reports.guard("the mark that something was saved"):
            self._mark_saved()
        self._reports.checkpoint(self.version, seconds)
        self._intake.commit(oldest.ledgers, self.version)

    def save_failed(self, count: int) -> None:
        """The `count`-th save of this learner failed; it goes on."""
        self._reports.log({"checkpoint/failed": count}, step=self.version)

    def finish(self) -> None:
        """Wait for the evaluation of the final weights, then send everybody home."""
        self._phase = "evaluating"
        until_s = time.monotonic() + LAST_EVAL_S
        while self._evaluation.missing and time.monotonic() < until_s:
            self._heal(self.version)
            self._reports.evaluation(self._evaluation.wait(1.0))
        if missing := self._evaluation.missing:
            log.warning("%d rounds of evaluation were not answered within %.0f s and are left out", missing, LAST_EVAL_S)
        self._lane.close()
        self._phase, self._message = "finished", "the training is done"

    # --- being seen ------------------------------------------------------------------------------------------------

    def _snapshot(self) -> StatusSnapshot:
        self._eval_watch.audit()
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
            audit=self._watch.audit(),
            audit_mismatch=self._mismatch,
            counters=self._hub.counters(),
            message=self._message,
        )


class Ticker:
    """Calls `tick` once a second from a thread of its own: also while the learner waits or steps."""

    def __init__(self, tick: Callable[[], None], guard: BestEffort) -> None:
        self._tick, self._guard = tick, guard
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asyncrl-tick", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Tick once more and end."""
        self._stop.set()
        self._thread.join(timeout=10.0)
        self._tick_once()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            self._tick_once()

    def _tick_once(self) -> None:
        with self._guard("status and its kin"):
            self._tick()


def interface_of(bind: str | None) -> str | None:
    """The address that generators on other hosts reach; None when all are on this host."""
    return None if bind is None else bind.removeprefix("tcp://").rpartition(":")[0]
