"""The learner's state in a checkpoint, next to the trainer's files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from asyncrl.lineage import INITIAL, History


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """Everything that the learner needs to continue from a checkpoint."""

    version: int = 0
    ledger: Mapping[str, Any] = field(default_factory=dict)  # of the training lane, as its intake wrote it
    history: History = INITIAL  # lineages of the weights
    evaluation: dict[str, Any] = field(default_factory=dict)  # `Evaluation.state`
    # Config values that must not change: `config.resume.fixed_values`.
    fixed: dict[str, Any] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)  # adaptive coefficients of KL and entropy

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint's JSON."""
        return {
            "version": self.version,
            "ledger": self.ledger,
            "history": str(self.history),
            "evaluation": self.evaluation,
            "fixed": self.fixed,
            "coefficients": self.coefficients,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; an empty dict is the beginning."""
        if not values:
            return cls()
        return cls(
            version=values["version"],
            ledger=values["ledger"],
            history=History.parse(values["history"]),
            evaluation=values["evaluation"],
            fixed=values["fixed"],
            coefficients=values["coefficients"],
        )
