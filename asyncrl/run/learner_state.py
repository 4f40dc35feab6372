"""The learner's state in a checkpoint, next to the trainer's files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from asyncrl.lineage import INITIAL, History


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """Everything that the learner needs to continue from a checkpoint."""

    version: int = 0
    ledger: Mapping[str, Any] = field(default_factory=dict)  # `settled` of the training lane's intake
    history: History = INITIAL  # lineages of the weights
    evaluation: dict[str, Any] = field(default_factory=dict)  # `Evaluation.state`
    # Config values that must not change: `Config.fixed_values`.
    fixed: dict[str, Any] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)  # adaptive coefficients of KL and entropy
    curriculum: dict[str, Any] = field(default_factory=dict)  # `Curriculum.state`; empty without one

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the checkpoint's JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"history": str(self.history)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; an empty dict is the beginning."""
        if not values:
            return cls()
        # A checkpoint of an earlier release has no curriculum.
        found = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        return cls(**found | {"history": History.parse(values["history"])})
