"""A refused update says what the difference means, and what to do about it."""

import math

import pytest

from asyncrl.weights.base import UpdateReport
from asyncrl.weights.refusal import ProbeRefused


@pytest.mark.parametrize(
    ("difference", "dtype", "said"),
    [
        (
            0.118,
            "bfloat16",
            "ordinary rounding of bfloat16; set weights.probe_limit=0.2, or model.dtype=float32",
        ),
        (
            0.4647,
            "bfloat16",
            "ordinary rounding of bfloat16; set weights.probe_limit=0.9, or model.dtype=float32",
        ),
        (3.0, "bfloat16", "more than rounding of bfloat16 explains; the engine holds other weights"),
        (0.118, "float32", "more than rounding of float32 explains; the engine holds other weights"),
        (5e-4, "float32", "rounding of other kernels"),
        (math.nan, "bfloat16", "more than rounding"),
        (math.inf, "float32", "more than rounding"),
    ],
)
def test_the_diagnosis_is_true_for_the_size_and_the_dtype(difference, dtype, said):
    error = ProbeRefused(difference, limit=0.05, dtype=dtype)
    assert str(error).startswith(
        f"the probe differs from the learner's by {difference:.4g} nats, allowed is 0.05 "
        "(weights.probe_limit)"
    )
    assert said in str(error)
    # It can be told, whatever it is.
    UpdateReport(version=1, applied=False, reason=str(error), probe_max=error.difference)
