"""The probe's rule: what rounding explains is accepted, in float32 nothing else, and a refusal says what to do."""

import math
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.weights.agreement import Agreement, Difference, ProbeRefused, learner_fault
from asyncrl.weights.base import UpdateOrder, UpdateReport

TOKENS = 32


def order(**logprobs):
    return UpdateOrder(
        version=1,
        transport="slot",
        deadline_s=1.0,
        details={},
        probe_ids=(tuple(range(TOKENS + 1)),),
        **{"probe_logprobs": (0.0,) * TOKENS, "initial_logprobs": (0.0,) * TOKENS} | logprobs,
    )


def scores(mean, most):
    """Scores of one sequence that differ from zeros by these values."""
    made = np.full(TOKENS, (mean * TOKENS - most) / (TOKENS - 1), dtype=np.float32)
    made[3] = -most
    return made


FP8 = "quantization: fp8, kv_cache_dtype: fp8"


def agreement(dtype, floor=(0.0, 0.0), limit=0.05, quantisation=""):
    made = Agreement(limit=limit, dtype=dtype, quantisation=quantisation)
    made.begin(scores(*floor), order())
    return made


def fp8(dtype, floor):
    return agreement(dtype, floor, quantisation=FP8)


def accepts(rule, mean, most):
    try:
        return bool(rule.judge(scores(mean, most), order()))
    except ProbeRefused:
        return False


# Eight draws of the probe with SmolLM2-135M in bfloat16, a learner in PyTorch against vLLM on a CPU.
LARGEST = (0.234, 0.265, 0.151, 0.145, 0.199, 0.173, 0.257, 0.217)


def test_rounding_of_bfloat16_is_accepted_whichever_draw_was_the_floor():
    for floor in LARGEST:
        rule = agreement("bfloat16", (0.068, floor))
        assert all(accepts(rule, mean, most) for mean in (0.05, 0.068, 0.1) for most in LARGEST)


def test_updates_of_a_correct_engine_on_a_gpu_are_well_within_the_allowance():
    """Mean and largest difference of the worst of 44 updates, an H200, 15 M parameters (bench/results/gpu.json)."""
    assert accepts(agreement("bfloat16", (0.0403, 0.1124)), 1.4 * 0.0789, 1.4 * 0.2350)


@pytest.mark.parametrize(
    ("dtype", "floor", "allowed"),
    [
        ("float32", (1e-5, 5e-5), (0.05, 0.05)),
        ("float32", (0.02, 0.04), (0.05, 0.05)),  # not laxer than the limit, whatever the floor
        ("bfloat16", (0.001, 0.005), (0.05, 0.05)),  # nor stricter than the limit
        ("bfloat16", (0.07, 0.25), (0.21, 1.0)),
        ("bfloat16", (0.07, 0.9), (0.21, 3.6)),
    ],
)
def test_the_allowance_is_exact(dtype, floor, allowed):
    rule, (mean, most) = agreement(dtype, floor), allowed
    assert accepts(rule, min(0.9 * mean, most / 2), 0.999 * most)
    assert not accepts(rule, min(0.9 * mean, most / 2), 1.001 * most)
    assert accepts(rule, 0.999 * mean, 0.9995 * max(most, mean))
    if most > mean:
        assert not accepts(rule, 1.001 * mean, 0.9 * most)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("floor", [(0.24, 0.76), (0.519, 2.148), (0.99, 3.9)])
def test_a_floor_of_fp8_is_accepted_and_later_versions_are_judged_by_it(dtype, floor):
    rule, (mean, most) = fp8(dtype, floor), floor
    assert accepts(rule, mean, most)
    assert accepts(rule, 2.99 * mean, 3.99 * most)
    assert not accepts(rule, 3.01 * mean, 3.5 * most)
    assert not accepts(rule, mean, 4.01 * most)
    assert not accepts(fp8(dtype, (1.1, 2.0)), 0.0, 0.0) and not accepts(fp8(dtype, (0.5, 4.1)), 0.0, 0.0)
    assert not accepts(fp8(dtype, (1e-3, 5e-3)), 0.06, 0.1), "an engine that agrees well must go on so"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_refusal_names_the_quantisation_as_a_cause(dtype):
    for rule, said in (
        (
            fp8(dtype, (1.2, 5.0)),
            rf"rounding of {dtype} with {FP8} explains 1 and 4 \(.*{{{FP8}}}\): compare",
        ),
        (fp8(dtype, (0.4, 1.0)), rf"the engine computes these weights differently \(.*{{{FP8}}}\): compare"),
    ):
        with pytest.raises(ProbeRefused, match=f"{said} with .*without the quantisation; if .*=1e\\+01$"):
            rule.judge(scores(1.2, 5.0), order())


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("quantisation", ["", FP8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_no_number_is_refused_and_can_be_reported(dtype, quantisation, wrong):
    good = agreement(dtype, quantisation=quantisation)
    for rule, update in (
        (good, order(probe_logprobs=(wrong,) * TOKENS)),
        (replace(good, floor=Difference(abs(wrong), abs(wrong))), order()),
    ):
        with pytest.raises(ProbeRefused) as refused:
            rule.judge(scores(0.0, 0.0), update)
        UpdateReport(version=1, applied=False, reason=str(refused.value), **refused.value.measured)


@pytest.mark.parametrize(
    ("dtype", "floor", "accepted"),
    [
        ("bfloat16", (0.08, 0.47), True),
        ("bfloat16", (0.3, 0.9), False),
        ("bfloat16", (0.2, 1.1), False),
        ("float32", (0.01, 0.04), True),
        ("float32", (0.01, 0.06), False),
    ],
)
def test_a_floor_that_rounding_does_not_explain_is_refused_at_every_update(dtype, floor, accepted):
    rule = agreement(dtype, floor)
    for _ in range(2):
        assert accepts(rule, 0.0, 0.0) is accepted
    if not accepted:
        with pytest.raises(ProbeRefused, match="before the first update") as refused:
            rule.judge(scores(0.0, 0.0), order())
        assert refused.value.measured["floor_max"] == pytest.approx(floor[1])


def test_the_limit_that_a_refused_floor_asks_for_is_enough():
    rule = agreement("bfloat16", (0.6, 2.6))
    with pytest.raises(ProbeRefused, match=r"set weights\.probe_limit=5$"):
        rule.judge(scores(0.6, 2.6), order())
    assert accepts(replace(rule, limit=5.0), 0.6, 2.6)


@pytest.mark.parametrize("moved", [10.5, float("nan")])
def test_a_learning_rate_is_named_where_training_destroyed_the_policy(moved):
    far, near = ({"initial_logprobs": (nats,) * TOKENS} for nats in (moved, 9.0))
    for logprobs, is_named in ((far, True), (near, False)):
        with pytest.raises(ProbeRefused) as refused:
            agreement("bfloat16", (0.07, 0.25)).judge(scores(1.0, 3.0), order(**logprobs))
        assert ("lower learner.optimizer.lr" in str(refused.value)) is is_named


@pytest.mark.parametrize(
    ("dtype", "difference", "said"),
    [
        ("bfloat16", 3.0, "set weights.probe_limit=6"),
        ("bfloat16", 3.0, "differed by 0.07 nats on average and 0.25 at most"),
        ("float32", 0.118, "the engine computes these weights differently"),
        ("float32", 5e-4, "rounding of other kernels"),
    ],
)
def test_a_refusal_says_what_was_found_what_is_allowed_and_what_to_do(dtype, difference, said):
    floor = (0.07, 0.25) if dtype == "bfloat16" else (1e-6, 1e-5)
    with pytest.raises(ProbeRefused) as refused:
        agreement(dtype, floor, limit=1e-4).judge(scores(difference / 8, difference), order())
    message = str(refused.value)
    assert message.startswith("the probe differs from the learner's by ")
    assert f"{difference:.3g} at most; allowed are" in message and said in message


def test_the_report_has_what_was_measured():
    measured = agreement("bfloat16", (0.07, 0.25)).judge(scores(0.06, 0.2), order())
    assert measured == pytest.approx(
        {"probe_mean": 0.06, "probe_max": 0.2, "probe_limit": 1.0, "floor_mean": 0.07, "floor_max": 0.25}
    )


def test_the_floor_is_said_once_in_plain_words(caplog):
    caplog.set_level("INFO")
    rule = agreement("bfloat16", (0.068, 0.234))
    rule.judge(scores(0.06, 0.2), order())
    assert [record.getMessage() for record in caplog.records] == [
        "engine and learner score the probe with the same weights and differ by 0.068 nats on average and 0.234 "
        "at most: rounding of bfloat16; an update may differ by 0.204 nats on average and 0.936 at most"
    ]


ZEROS = scores(0.0, 0.0)


@pytest.mark.parametrize(
    ("packed", "alone", "said"),
    [
        (scores(0.01, 0.04), scores(0.01, 0.04), ""),
        # Rounding of bfloat16 alone and packed, of which the packed one happens to be larger.
        (scores(0.1, 0.5), scores(0.06, 0.2), ""),
        (scores(0.3, 2.0), scores(0.3, 2.0), "each alone"),
        (scores(0.2, 0.9), scores(0.01, 0.04), "one sequence leaks into the next"),
        (scores(0.01, np.nan), scores(0.01, 0.04), "one sequence leaks into the next"),
        (scores(0.01, 0.04), scores(0.01, np.nan), "each alone"),
    ],
)
def test_a_learner_that_differs_from_transformers_is_found(packed, alone, said):
    fault = learner_fault(packed, alone, ZEROS.tolist(), limit=0.05, dtype="bfloat16")
    assert said in fault
    assert bool(fault) is bool(said)


def test_float32_has_no_room_but_the_limit():
    parts = {"plain": ZEROS.tolist(), "dtype": "float32"}
    assert learner_fault(scores(0.01, 0.06), scores(0.0, 0.0), limit=0.05, **parts)
    assert not learner_fault(scores(0.01, 0.06), scores(0.0, 0.0), limit=0.1, **parts)
