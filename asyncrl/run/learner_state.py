"""What a checkpoint holds besides the trainer's own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from asyncrl.lineage import INITIAL, History


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """Enough to go on as if nothing had happened."""

    version: int = 0
    # Of the training lane, as its intake has written it; empty before the first checkpoint.
    ledger: Mapping[str, Any] = field(default_factory=dict)
    history: History = INITIAL  # of the weights
    evaluation: dict[str, Any] = field(default_factory=dict)
    # What of the config must not change: `config.resume.fixed_values`.
    fixed: dict[str, Any] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)  # of KL and entropy, where they are steered

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
            coefficients=values.get("coefficients", {}),  # checkpoints of release 0.1 have none
        )
