"""What only the learner's rank 0 does: the buffer, the senders, the control plane, evaluation, telemetry."""

import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from asyncrl import __version__
from asyncrl.algo import registry
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.intake import Collected, Intake, make_judge
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.run_record import RunRecord
from asyncrl.config.resolved import config_hash
from asyncrl.config.schema import Config
from asyncrl.data.dataset import load_rows
from asyncrl.data.prompts import load_tokenizer
from asyncrl.evaluation import EvalResult, Evaluation
from asyncrl.launch.directory import RunDirectory
from asyncrl.launch.report import eval_records, sample_records, step_metrics
from asyncrl.launch.wiring import eval_lane, train_lane, wire_key
from asyncrl.learner import Step
from asyncrl.trainer.deepspeed import DeepSpeedTrainer
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
        self, config: Config, directory: RunDirectory, store: StoreConnection, trainer: DeepSpeedTrainer, state: LearnerState
    ) -> None:
        self._config = config
        self._directory = directory
        self._store = store
        self._decode_text = partial(load_tokenizer(config.model).decode, skip_special_tokens=True)
        decode = partial(decode_group, key=wire_key())
        filters = [registry.resolve("filter", choice.name, choice.params) for choice in config.algorithm.filters]
        too_old = config.staleness.max_lag if config.staleness.policy == "drop" else None
        self._intake = Intake(
            buffer=train_lane(config, store),
            ledger=state.ledger,
            decode=decode,
            judge=make_judge(filters, drop_older_than=too_old),
            groups=config.batch.groups,
            window=config.window_groups,
            max_lag=config.staleness.max_lag,
            max_refills=config.algorithm.max_refills,
            stall_s=config.control.stall_s,
        )
        self._evaluation = self._make_evaluation(decode, state.eval_ledger)
        self._version = state.version
        self._recovered = False

    def _make_evaluation(self, decode: Any, ledger: Ledger) -> Evaluation | None:
        config = self._config
        if config.data.eval is None:
            return None
        prompts = min(config.eval.prompts, len(load_rows(config.data.eval, config.data.eval_split)))
        return Evaluation(
            buffer=eval_lane(config, self._store, prompts),
            ledger=ledger,
            decode=decode,
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
        self._log_evaluation(self._evaluation.poll() if self._evaluation else [])
        self._collected = self._intake.poll(version, wait_s=wait_s)
        if self._collected is None:
            return b""
        return json.dumps([group.ticket_id for group in self._collected.groups]).encode()
