"""The learner's state in a checkpoint, next to the trainer's files."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from asyncrl.config.schema import Config
from asyncrl.lineage import INITIAL, History
from asyncrl.run.checkpoint import CheckpointStore, Saveable
from asyncrl.run.directory import BEGAN_WITH, RunDirectory, first_weights

# Lineages are drawn: a learner cannot know how many learners died before it without a checkpoint.
MAX_LINEAGE = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """Everything that the learner needs to continue from a checkpoint."""

    version: int = 0
    ledger: Mapping[str, Any] = field(default_factory=dict)  # `settled` of the training lane's intake
    history: History = INITIAL  # lineages of the weights
    evaluation: dict[str, Any] = field(default_factory=dict)  # `Evaluation.state` of each set by its name
    # Values that must not change: `Config.fixed_values`, and `BEGAN_WITH`.
    fixed: dict[str, Any] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)  # adaptive coefficients of KL and entropy
    curriculum: dict[str, Any] = field(default_factory=dict)  # `Curricula.state`; empty without one
    tracker: dict[str, list[float]] = field(default_factory=dict)  # `Tracker.state`; empty without one
    stop: dict[str, Any] = field(default_factory=dict)  # `Record` of `learner.stop_when`; empty without one

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the checkpoint's JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"history": str(self.history)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; an empty dict is the beginning."""
        if not values:
            return cls()
        # A checkpoint of an earlier release has no curriculum, tracker or record.
        found = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        return cls(**found | {"history": History.parse(values["history"])})

    def begun(self, config: Config, *, rows: str) -> Self:
        """Return the state with which a learner continues: with a lineage of its own, and this config."""
        history = self.history.resumed(
            self.version, lineage=secrets.randbelow(MAX_LINEAGE) + 1, longest_lag=config.lag_bound
        )
        fixed = config.fixed_values(rows=rows) | {BEGAN_WITH: first_weights(config.model)[1]}
        return replace(self, history=history, fixed=fixed)


def resume(
    config: Config, directory: RunDirectory, trainer: Saveable
) -> tuple[CheckpointStore, LearnerState]:
    """Load the newest checkpoint into the trainer, if there is one. Raises CheckpointError."""
    checkpoints = CheckpointStore(directory.checkpoints, directory.checkpoint_key(), config.checkpoint.keep)
    return checkpoints, LearnerState.from_dict(checkpoints.load(trainer) or {})
