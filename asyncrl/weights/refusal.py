"""The error of a failed probe: the generator computes other log-probabilities than the learner."""

from asyncrl.errors import TransferError

# Largest difference on the probe that rounding explains, in nats, by dtype. The largest measured, over
# several models on a CPU, were 0.47 and 5e-5.
ROUNDING_NATS = {"bfloat16": 0.6, "float32": 1e-3}
LARGEST_DIFFERENCE = 1e6


class ProbeRefused(TransferError):
    """The weights have arrived, but the engine computes other log-probabilities than the learner."""

    def __init__(self, difference: float, *, limit: float, dtype: str) -> None:
        """`difference` is in nats; one that is not finite is recorded as 1e6."""
        if not difference <= ROUNDING_NATS[dtype]:
            meaning = (
                f"more than rounding of {dtype} explains; the engine holds other weights, or computes them "
                "differently (a kernel, an unsupported model): compare with model.dtype float32"
            )
        elif dtype == "float32":
            meaning = "rounding of other kernels; if the samples look right, raise weights.probe_limit"
        else:
            remedy = f"set weights.probe_limit={2 * difference:.1g}, or model.dtype=float32"
            meaning = f"ordinary rounding of {dtype}; {remedy}"
        super().__init__(
            f"the probe differs from the learner's by {difference:.4g} nats, allowed is {limit:g} "
            f"(weights.probe_limit): {meaning}"
        )
        self.difference = difference if difference <= LARGEST_DIFFERENCE else LARGEST_DIFFERENCE
