"""What rank 0 takes from the store: groups to train on, and the answers of held-out evaluation."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.buffer.base import Audit
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.intake import Collected, Intake
from asyncrl.buffer.judge import Gate
from asyncrl.buffer.lanes import eval_lane, group_limits, open_intake, train_lane
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.shards import ShardedBuffer, ShardedIntake
from asyncrl.buffer.watch import LONGEST_LOOK_S, AuditWatch
from asyncrl.config.schema import Config
from asyncrl.data.curriculum import Curricula, open_curricula
from asyncrl.data.data_files import DataFiles
from asyncrl.data.prompts import vocabulary_size
from asyncrl.evaluation import EvalResult, Evaluation, Rounds, resume_ledger
from asyncrl.hosting.progress import Attention
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.run.saved import LearnerState
from asyncrl.types import Group
from asyncrl.weights.base import EVERY_ROW
from asyncrl.wire.group_frames import decode_group

log = logging.getLogger(__name__)


@dataclass
class Taking:
    """All lanes, audited so that no id is lost; learners that die within a step are counted."""

    lane: RedisBuffer | ShardedBuffer
    intake: Intake | ShardedIntake  # takes from `lane`
    evaluations: Sequence[Evaluation]  # one for each set of data.eval
    _: KW_ONLY
    deaths: StepDeaths
    stall_s: float
    curriculum: Curricula | None = None
    _watches: list[AuditWatch] = field(init=False)  # that of training comes first
    _is_recovered: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        audits = {f"evaluation {one.name}".strip(): one.buffer.audit for one in self.evaluations}
        self._watches = [AuditWatch(*one) for one in ({"training": self.lane.audit} | audits).items()]

    def open(self, version: int) -> None:
        """Announce published weights, and so open their credit. The first call also makes the store agree."""
        for one in (self.intake, *self.evaluations):
            one.open(version) if self._is_recovered else one.recover(version)
        self._is_recovered = True

    def skipped(self) -> Mapping[str, bytes]:
        """Return the rows that epochs skip, for the orders of the version that is published next."""
        if self.curriculum is None:
            return EVERY_ROW
        assert isinstance(self.intake, Intake), "a rule of the config refuses shards"
        ledger = Ledger.from_dict(self.intake.settled)
        consumed, unfinished = ledger.consumed, ledger.watermark + 1
        # The last step trained B of the groups by which its limit, T + R + (L + 1) B, was higher.
        issued = consumed + self.intake.max_lag * self.intake.groups
        return self.curriculum.decide(consumed=consumed, unfinished=unfinished, issued=issued)

    def heal(self, version: int) -> None:
        """Make the store agree with the ledger if issued ids are missing or in two places."""
        for one, watch in zip((self.intake, *self.evaluations), self._watches, strict=True):
            if watch.is_recovery_due():
                one.recover(version)

    def poll(self, version: int, *, wait_s: float) -> Collected | None:
        """Take the groups of the step that trains `version`; None while they are not all there."""
        collected = self.intake.poll(version, wait_s=wait_s)
        if collected is None:
            return None
        if self.curriculum:
            self.curriculum.record(collected.results)
        self.deaths.begin(version, collected.frames)
        return collected

    def evaluated(self) -> list[EvalResult]:
        """Return the rounds of evaluation that have become complete."""
        return [result for one in self.evaluations for result in one.poll()]

    def last_rounds(self, version: int) -> Iterator[list[EvalResult]]:
        """Wait for the rounds that are open after the last step, until no group arrives for `stall_s`."""
        last, until_s, clock = -1, 0.0, Attention(longest_s=LONGEST_LOOK_S)
        while missing := sum(one.missing for one in self.evaluations):
            arrived = sum(one.buffer.audit().counters.get("put", 0) for one in self.evaluations)
            if arrived != last:
                last, until_s = arrived, clock.look() + self.stall_s
            elif clock.look() > until_s:
                found = "no group arrived for %.0f s (control.stall_s): %d rounds of evaluation are left out"
                log.warning(found, self.stall_s, missing)
                return
            self.heal(version)
            yield [result for one in self.evaluations for result in one.wait(1.0)]

    @property
    def settled(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """State for a checkpoint after the last whole step: of ledger, evaluation sets, and curriculum."""
        curriculum = self.curriculum.state() if self.curriculum else {}
        sets = {one.name: one.state() for one in self.evaluations}
        return self.intake.settled, sets, curriculum

    def revoke(self, holder: str) -> None:
        """Issue the tickets of a dead generator again, before its leases run out."""
        for lane in (self.lane, *(one.buffer for one in self.evaluations)):
            if count := lane.revoke(holder):
                log.info("%d tickets of %s are issued again", count, holder)

    def audit(self) -> Audit:
        """Count issued training ids by place; the ids of the evaluation are audited too."""
        training, *_ = [watch.audit() for watch in self._watches]
        return training

    @property
    def mismatch(self) -> int:
        """Ids of a lane that are nowhere (> 0) or in two places (< 0)."""
        return max((watch.mismatch for watch in self._watches), key=abs)

    def counters(self) -> dict[str, float]:
        """The store's and the curriculum's part in the metrics of a step."""
        recoveries = sum(watch.recoveries for watch in self._watches)
        skipped = self.curriculum.metrics() if self.curriculum else {}
        return {"buffer/audit_mismatch": self.mismatch, "buffer/recoveries": recoveries} | skipped


def open_taking(
    config: Config,
    store: StoreConnection,
    data: DataFiles,
    state: LearnerState,
    *,
    wire_key: bytes,
    step_under_way: Path,
    fault: Callable[[Group], str | None] | None = None,
) -> Taking:
    """Open all lanes where `state` left them. Raises ConfigError if the number of shards has changed.

    `fault` returns why a group does not fit the images of its row.
    """
    decode: Callable[[bytes], Group] = partial(decode_group, key=wire_key)
    lane = train_lane(config, store)
    deaths = StepDeaths(step_under_way)
    vocabulary = vocabulary_size(config.model)
    limits, _ = group_limits(config, vocabulary)
    gate = Gate(lane="train", decode=decode, limits=limits, condemned=deaths.reason)
    intake = open_intake(config, lane, state.ledger, gate, state.history, fault)
    held_out = {name: group_limits(config.of(one), vocabulary)[1] for name, one in config.data.sets.items()}
    evaluations = [
        Evaluation(
            name=name,
            buffer=eval_lane(config, store, rounds.lane, rounds.prompts),
            ledger=resume_ledger(state.evaluation.get(name, {}), rounds, version=state.version),
            gate=Gate(lane=rounds.lane, decode=decode, limits=held_out[name]),
            rounds=rounds,
            history=state.history,
        )
        for name, rounds in Rounds.of(config, data.held_out).items()
    ]
    curriculum = open_curricula(config, data.train_rows, state.curriculum)
    stall_s = config.control.stall_s
    return Taking(lane, intake, evaluations, deaths=deaths, stall_s=stall_s, curriculum=curriculum)
