"""Whether engine, learner and transformers compute the same log-probabilities of the probe, but for rounding.

All begin with the same checkpoint. When a learner starts, its packed sequences are compared with those of
transformers, each alone; the floor is the learner's difference on sequences alone. Then each engine is
compared with the learner: their first difference is the floor. For packed sequences, and after an update,

    mean <= max(limit, 3 * floor mean)    and    largest <= max(limit, 4 * floor largest)

must hold. That the right weights have arrived is not said by the probe, but by checksums.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from asyncrl.errors import TransferError
from asyncrl.weights.base import PROBE_FIELDS, UpdateOrder

log = logging.getLogger(__name__)

# Recorded in place of a difference that is larger, infinite or NaN.
LARGEST_DIFFERENCE = 1e6


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two rows of log-probabilities, in nats; NaN is within no limit."""

    mean: float
    max: float

    @classmethod
    def between(cls, scores: ArrayLike, logprobs: ArrayLike) -> Self:
        """The mean and the largest absolute difference."""
        absolute = np.abs(np.subtract(scores, logprobs, dtype=np.float32))
        return cls(float(absolute.mean()), float(absolute.max()))

    def within(self, limit: "Difference") -> bool:
        """Whether neither value is above the limit's."""
        return self.mean <= limit.mean and self.max <= limit.max

    def __str__(self) -> str:
        return f"{self.mean:.3g} nats on average and {self.max:.3g} at most"


# The largest floor that rounding explains. Measured on CPUs with correct engines, in bfloat16: up to 0.08 on
# average and 0.47 at most; in float32 up to 5e-5, for which `weights.probe_limit` alone has room.
EXPLAINED = {"float32": Difference(0.0, 0.0), "bfloat16": Difference(0.25, 1.0)}
# The same for an engine with FP8: about twice the differences between FP8, emulated on CPUs, and bfloat16,
# which were up to 0.52 on average and 2.15 at most (bench.fp8). A GPU had 0.57 and 1.31 with the same model.
QUANTISED = Difference(1.0, 4.0)
# Factors on the floor: 20 updates of a correct engine on a GPU reached 1.96 and 2.1.
MEANS, LARGEST = 3.0, 4.0
OTHER_KERNELS_NATS = 1e-3  # in float32
FAR_NATS = 10.0  # about ln of a vocabulary: so far from its beginning, a policy knows nothing any more


def _allowed(floor: Difference, limit: float, explained: Difference) -> Difference:
    return Difference(
        max(limit, MEANS * min(explained.mean, floor.mean)),
        max(limit, LARGEST * min(explained.max, floor.max)),
    )


def _plausible(limit: float, explained: Difference) -> Difference:
    """The largest floor."""
    return Difference(max(limit, explained.mean), max(limit, explained.max))


def learner_fault(
    packed: Sequence[float], alone: Sequence[float], plain: Sequence[float], *, limit: float, dtype: str
) -> str:
    """Say how the learner differs from transformers with the same weights; empty if by rounding alone.

    The learner scored the same sequences `packed` in one pass, and each `alone`; transformers scored `plain`.
    """
    floor, found = Difference.between(alone, plain), Difference.between(packed, plain)
    plausible, allowed = _plausible(limit, EXPLAINED[dtype]), _allowed(floor, limit, EXPLAINED[dtype])
    cure = (
        f"if rounding of {dtype} explains it (compare model.dtype=float32), raise weights.probe_limit; "
        "otherwise choose a model that docs/models.md calls right; nothing has been trained"
    )
    if not floor.within(plausible):
        return (
            f"the learner differs from transformers by {floor} on sequences each alone; allowed "
            f"are {plausible.mean:g} and {plausible.max:g}: it computes layers or logits differently; {cure}"
        )
    if not found.within(allowed):
        return (
            f"the learner differs from transformers by {found} on packed sequences, and by {floor} on each "
            f"alone; allowed are {allowed.mean:.3g} and {allowed.max:.3g}: one sequence leaks into the next; "
            f"{cure}"
        )
    return ""


class ProbeRefused(TransferError):
    """The engine's log-probabilities of new weights differ from the learner's. `measured`: report fields."""

    def __init__(self, message: str, measured: dict[str, Any]) -> None:
        super().__init__(message)
        self.measured = measured


@dataclass(slots=True, kw_only=True)
class Agreement:
    """The rule for one engine: `begin` before its first update, `judge` after each."""

    limit: float  # `weights.probe_limit`, in nats
    dtype: str  # of the model
    quantisation: str = ""  # the engine's settings for it, as in the config
    floor: Difference | None = None
    has_passed: bool = False  # whether any weights have passed; the learner orders the initial model, too

    def begin(self, scores: Sequence[float], order: UpdateOrder) -> None:
        """Take the floor from the engine's scores of the probe with the weights of version 0."""
        self.floor = Difference.between(scores, order.initial_logprobs)
        log.info(
            "engine and learner score the probe with the same weights and differ by %s: rounding of %s; "
            "an update may differ by %s",
            *(self.floor, self._rounding, _allowed(self.floor, self.limit, self._explained)),
        )

    def judge(self, scores: Sequence[float], order: UpdateOrder) -> dict[str, Any]:
        """Compare the engine's scores of the probe with the learner's; return the fields of the report.

        Raises ProbeRefused if they, or those of version 0, differ by more than rounding explains.
        """
        assert self.floor is not None
        found = Difference.between(scores, order.probe_logprobs)
        allowed = _allowed(self.floor, self.limit, self._explained)
        values = (found.mean, found.max, allowed.max, self.floor.mean, self.floor.max)
        measured = dict(zip(PROBE_FIELDS, (min(LARGEST_DIFFERENCE, each) for each in values), strict=True))
        plausible = _plausible(self.limit, self._explained)
        if not self.floor.within(plausible):
            raise ProbeRefused(
                f"before the first update, the probe differed from the learner's by {self.floor}, though the "
                f"learner agrees with transformers; rounding of {self._rounding} explains "
                f"{plausible.mean:g} and {plausible.max:g} (or weights.probe_limit): the engine has loaded "
                f"another model.path, or computes it differently ({self._causes}): "
                f"{self._remedy(self.floor)}",
                measured,
            )
        if not found.within(allowed):
            moved = Difference.between(order.probe_logprobs, order.initial_logprobs)
            raise ProbeRefused(self._update_refused(found, allowed, moved), measured)
        self.has_passed = True
        return measured

    @property
    def _explained(self) -> Difference:
        return QUANTISED if self.quantisation else EXPLAINED[self.dtype]

    @property
    def _rounding(self) -> str:
        """What rounds, for a message."""
        return f"{self.dtype} with {self.quantisation}" if self.quantisation else self.dtype

    def _update_refused(self, found: Difference, allowed: Difference, moved: Difference) -> str:
        differs = (
            f"the probe differs from the learner's by {found}; allowed are {allowed.mean:.3g} and "
            f"{allowed.max:.3g} (weights.probe_limit is {self.limit:g})"
        )
        if self._is_exact and found.max <= OTHER_KERNELS_NATS:
            return (
                f"{differs}: rounding of other kernels; if the samples look right, raise weights.probe_limit"
            )
        if not moved.mean <= FAR_NATS:
            return (
                f"{differs}. Training has moved the learner's own scores of the probe by {moved}, which "
                "destroys a model: lower learner.optimizer.lr by ten times or more, and begin again"
            )
        return (
            f"{differs}, and with the weights of model.path it differed by {self.floor}: the engine computes "
            f"these weights differently ({self._causes}): {self._remedy(found)}"
        )

    @property
    def _is_exact(self) -> bool:
        return self.dtype == "float32" and not self.quantisation

    @property
    def _causes(self) -> str:
        by_setting = f"generator.vllm: {{{self.quantisation}}}" if self.quantisation else "a quantised model"
        return f"a kernel, an unsupported model, {by_setting}"

    def _remedy(self, found: Difference) -> str:
        if self._is_exact:
            return "compare the releases of generator and learner"
        without = " and without the quantisation" if self.quantisation else ""
        limit = f"{2 * found.max:.1g}"
        return (
            f"compare with model.dtype=float32{without}; if the samples look right, set "
            f"weights.probe_limit={limit}"
        )
