"""Names of weights that stay unique after a crash: a version counts steps, a lineage names their learner.

A learner that goes back to checkpoint 7 makes a second version 8, with other weights than the first. So each
start of the learner is a new lineage. A history lists the versions that led to the current weights:

    lineage 5 made 1..9, its checkpoint is 7      History(lineage=5)
    a new learner, lineage 6, goes on from 7      History(lineage=6, before=(Weights(7, lineage=5),))
    Weights(7, 5) and Weights(8, 6) are in it; Weights(8, 5) is not: groups that it sampled are not trained
"""

from dataclasses import dataclass
from typing import NamedTuple, Self


class Weights(NamedTuple):
    """The name of weights of the policy. Different weights of a run have different names."""

    version: int
    lineage: int = 0  # 0 for the initial model


@dataclass(frozen=True, slots=True)
class History:
    """The lineages that led to the weights being trained: the learner's own, and those that it continues."""

    lineage: int = 0  # of the versions that this learner makes
    before: tuple[Weights, ...] = ()  # the last version of each earlier lineage that belongs to it, ascending

    def __contains__(self, weights: Weights) -> bool:
        return weights.lineage == self.lineage or any(
            weights.lineage == last.lineage and weights.version <= last.version for last in self.before
        )

    def weights(self, version: int) -> Weights:
        """The name of a version: under the earlier lineage that made it, or else under this one."""
        made_by = (last.lineage for last in self.before if version <= last.version)
        return Weights(version, next(made_by, self.lineage))

    def resumed(self, version: int, *, lineage: int, longest_lag: int) -> "History":
        """The history of a learner that goes on from `version`, without lineages too old to be trained on."""
        recent = (last for last in self.before if version - longest_lag <= last.version < version)
        return History(lineage, (*recent, self.weights(version)))

    def __str__(self) -> str:
        """The text in the store, in orders and in checkpoints."""
        return " ".join(map(str, (self.lineage, *(number for last in self.before for number in last))))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`."""
        lineage, *numbers = map(int, text.split())
        return cls(lineage, tuple(map(Weights, numbers[::2], numbers[1::2])))


# The history before the first learner starts.
INITIAL = History()
