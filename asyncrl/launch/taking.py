"""What rank 0 takes from the store: groups to train on, and the answers of held-out evaluation."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.buffer.base import Audit
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.gate import Gate
from asyncrl.buffer.intake import Intake
from asyncrl.buffer.lanes import eval_lane, group_limits, open_intake, train_lane
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.shards import ShardedBuffer, ShardedIntake
from asyncrl.buffer.watch import AuditWatch
from asyncrl.config.schema import Config
from asyncrl.data.curriculum import Curricula
from asyncrl.data.data_files import DataFiles
from asyncrl.data.prompts import open_curricula, vocabulary_size
from asyncrl.evaluation import EvalResult, Evaluation, Rounds, resume_ledger
from asyncrl.launch.same_bytes import DecodedFrames, Taken
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.run.learner_state import LearnerState
from asyncrl.types import Group
from asyncrl.weights.base import EVERY_ROW
from asyncrl.wire.decoder import IsolatedDecoder
from asyncrl.wire.group_frames import decode_group

log = logging.getLogger(__name__)

# Longest wait for the evaluation of the final weights.
LAST_EVAL_S = 300.0


@dataclass
class Taking:
    """Both lanes, audited so that no id is lost; learners that die within a step are counted."""

    lane: RedisBuffer | ShardedBuffer
    # Takes from `lane`, and decodes with `decoded`.
    intake: Intake | ShardedIntake
    evaluation: Evaluation
    _: KW_ONLY
    decoded: DecodedFrames
    deaths: StepDeaths
    curriculum: Curricula | None = None
    _watch: AuditWatch = field(init=False)
    _eval_watch: AuditWatch = field(init=False)
    _is_recovered: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._watch = AuditWatch("training", self.lane.audit)
        self._eval_watch = AuditWatch("evaluation", self.evaluation.buffer.audit)

    def open(self, version: int) -> None:
        """Announce published weights, and so open their credit. The first call also makes the store agree."""
        if self._is_recovered:
            self.intake.open(version)
            self.evaluation.open(version)
        else:
            self.intake.recover(version)
            self.evaluation.recover(version)
            self._is_recovered = True

    def skipped(self) -> Mapping[str, bytes]:
        """Return the rows that epochs skip, for the orders of the version that is published next."""
        if self.curriculum is None:
            return EVERY_ROW
        assert isinstance(self.intake, Intake), "a rule of the config refuses shards"
        ledger = self.intake.settled
        return self.curriculum.decide(consumed=ledger.consumed, unfinished=ledger.watermark + 1)

    def heal(self, version: int) -> None:
        """Make the store agree with the ledger if issued ids are missing or in two places."""
        if self._watch.is_recovery_due():
            self.intake.recover(version)
        if self._eval_watch.is_recovery_due():
            self.evaluation.recover(version)

    def poll(self, version: int, *, wait_s: float) -> Taken | None:
        """Take the groups of the step that trains `version`; None while they are not all there."""
        collected = self.intake.poll(version, wait_s=wait_s)
        if collected is None:
            return None
        if self.curriculum:
            self.curriculum.record([*collected.groups, *(group for group, _ in collected.rejected)])
        taken = Taken(collected, self.decoded.of_step(collected.groups))
        self.deaths.begin(version, taken.frames)
        return taken

    def trained(self, version: int) -> None:
        """Record that the step from `version` is over: its groups killed no learner."""
        self.deaths.end(version)

    def evaluated(self) -> list[EvalResult]:
        """Return the rounds of evaluation that have become complete."""
        return self.evaluation.poll()

    def last_rounds(self, version: int) -> Iterator[list[EvalResult]]:
        """Wait for the rounds that are open after the last step, at most `LAST_EVAL_S`."""
        until_s = time.monotonic() + LAST_EVAL_S
        while self.evaluation.missing and time.monotonic() < until_s:
            self.heal(version)
            yield self.evaluation.wait(1.0)
        if missing := self.evaluation.missing:
            found = "%d rounds of evaluation were not complete within %.0f s and are left out"
            log.warning(found, missing, LAST_EVAL_S)

    def close(self) -> None:
        """Tell the generators that no ticket will follow."""
        self.lane.close()

    @property
    def settled(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """State for a checkpoint after the last whole step: of the ledger, the evaluation, the curriculum."""
        curriculum = self.curriculum.state() if self.curriculum else {}
        return self.intake.settled.to_dict(), self.evaluation.state(), curriculum

    def commit(self, ledger: Mapping[str, Any], version: int) -> None:
        """Let the store forget the groups of the checkpoint that holds `ledger`."""
        self.intake.commit(ledger, version)

    def revoke(self, holder: str) -> None:
        """Issue the tickets of a dead generator again, before its leases run out."""
        for lane in (self.lane, self.evaluation.buffer):
            if count := lane.revoke(holder):
                log.info("%d tickets of %s are issued again", count, holder)

    def audit(self) -> Audit:
        """Count issued training ids by place; the ids of the evaluation are audited too."""
        self._eval_watch.audit()
        return self._watch.audit()

    @property
    def mismatch(self) -> int:
        """Ids of either lane that are nowhere (> 0) or in two places (< 0)."""
        return max(self._watch.mismatch, self._eval_watch.mismatch, key=abs)

    def counters(self) -> dict[str, float]:
        """The store's and the curriculum's part in the metrics of a step."""
        recoveries = self._watch.recoveries + self._eval_watch.recoveries
        skipped = self.curriculum.metrics() if self.curriculum else {}
        return {"buffer/audit_mismatch": self.mismatch, "buffer/recoveries": recoveries} | skipped


def open_taking(
    stack: ExitStack,
    config: Config,
    store: StoreConnection,
    data: DataFiles,
    state: LearnerState,
    *,
    wire_key: bytes,
    step_under_way: Path,
    fault: Callable[[Group], str | None] | None = None,
) -> Taking:
    """Open both lanes where `state` left them. Raises ConfigError if the number of shards has changed.

    `fault` returns why a group does not fit the images of its row.
    """
    decode: Callable[[bytes], Group] = partial(decode_group, key=wire_key)
    if config.store.isolate_decoding:
        isolated = IsolatedDecoder(wire_key)
        stack.callback(isolated.close)
        decode = isolated.decode
    decoded = DecodedFrames(decode)
    lane = train_lane(config, store)
    deaths = StepDeaths(step_under_way)
    limits, eval_limits = group_limits(config, vocabulary_size(config.model))
    gate = Gate(lane="train", decode=decoded.decode, limits=limits, condemned=deaths.reason)
    intake = open_intake(config, lane, state.ledger, gate, state.history, fault)
    rounds = Rounds.of(config, min(config.eval.prompts, data.held_out_rows))
    evaluation = Evaluation(
        buffer=eval_lane(config, store, rounds.lane, rounds.prompts),
        ledger=resume_ledger(state.evaluation, rounds, version=state.version),
        gate=Gate(lane=rounds.lane, decode=decode, limits=eval_limits),
        rounds=rounds,
        history=state.history,
    )
    curriculum = open_curricula(config, data.train_rows, state.curriculum)
    return Taking(lane, intake, evaluation, decoded=decoded, deaths=deaths, curriculum=curriculum)
