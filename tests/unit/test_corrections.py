"""Importance weights against their formulas, at their bounds, and against their invariants."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.corrections import Correction, combined
from asyncrl.algo.metrics import merge
from asyncrl.algo.tokens import TokenBatch
from asyncrl.config import registry
from tests.support.algo_cases import Case, cast, make_case, pick

Rows = list[list[float]]
"""[sequence][token]"""


def log_ratios(case: Case) -> Rows:
    batch = case.batch
    found: Rows = [[] for _ in range(batch.num_sequences)]
    for s, to, of in zip(
        batch.sequence_T.tolist(),
        batch.anchor_logprobs_T.tolist(),
        batch.behaviour_logprobs_T.tolist(),
        strict=True,
    ):
        found[s].append(max(-20.0, min(20.0, to - of)))
    return found


def at_level(rows: Rows, level: str, function: Callable[[float], float] = math.exp) -> Rows:
    """The ratio (or a divergence) of each token at a level."""
    if level == "token":
        return [[function(x) for x in row] for row in rows]
    return [
        [function(max(-20.0, min(20.0, sum(row) / (max(1, len(row)) if level == "geometric" else 1))))]
        * len(row)
        for row in rows
    ]


def spread(rows: Rows, level: str, function: Callable[[float], float]) -> Rows:
    """A divergence of each token, summed or averaged over the sequence."""
    if level == "token":
        return [[function(x) for x in row] for row in rows]
    return [
        [sum(map(function, row)) / (max(1, len(row)) if level == "geometric" else 1)] * len(row)
        for row in rows
    ]


def none(rows: Rows) -> tuple[Rows, Rows]:
    return at_level(rows, "token", lambda x: 1.0), at_level(rows, "token", lambda x: True)


def normalised(weights: Rows, level: str) -> Rows:
    counted = [w for row in weights for w in (row if level == "token" else row[:1])]
    return [[w * len(counted) / (sum(counted) or 1.0) for w in row] for row in weights]


def truncate(
    rows: Rows, level: str = "token", cap: float = 2.0, floor: float = 0.0, normalise: bool = False
) -> tuple[Rows, Rows]:
    weights = [[max(floor, min(w, cap)) for w in row] for row in at_level(rows, level)]
    return normalised(weights, level) if normalise else weights, none(rows)[1]


def mask(
    rows: Rows, level: str = "token", low: float = 0.5, high: float = 5.0, normalise: bool = False
) -> tuple[Rows, Rows]:
    ratios = at_level(rows, level)
    keep = [[low <= r <= high for r in row] for row in ratios]
    weights = [[r * k for r, k in zip(*pair, strict=True)] for pair in zip(ratios, keep, strict=True)]
    return normalised(weights, level) if normalise else weights, keep


def reject(
    rows: Rows,
    high: float,
    low: float | None = None,
    divergence: str = "k1",
    level: str = "sequence",
    weights: str = "token",
    cap: float = 2.0,
) -> tuple[Rows, Rows]:
    kept_weights = none(rows)[0] if weights == "none" else truncate(rows, weights, cap)[0]
    if divergence == "k1":
        return kept_weights, mask(rows, level, 1 / high if low is None else low, high)[1]
    function = {"k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[divergence]
    return kept_weights, [[d <= high for d in row] for row in spread(rows, level, function)]


def reject_probabilities(
    case: Case, high: float, divergence: str, level: str = "sequence"
) -> tuple[Rows, Rows]:
    """Of the sampled token against all others; weights 1."""
    batch = case.batch
    moved: Rows = [[] for _ in range(batch.num_sequences)]
    for s, to, of in zip(
        batch.sequence_T.tolist(),
        batch.anchor_logprobs_T.tolist(),
        batch.behaviour_logprobs_T.tolist(),
        strict=True,
    ):
        p, q = math.exp(to), math.exp(of)
        there = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        back = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        moved[s].append({"tv": abs(p - q), "binary_kl": there, "binary_kl_max": max(there, back)}[divergence])
    keep = [[d <= high for d in row] for row in spread(moved, level, lambda d: d)]
    return none(moved)[0], keep


def veto(rows: Rows, low: float = 1e-4, high: float = 1e4, cap: float = 2.0) -> tuple[Rows, Rows]:
    ratios = at_level(rows, "token")
    return truncate(rows, "token", cap)[0], [
        [all(low <= r <= high for r in row)] * len(row) for row in ratios
    ]


def m2po(rows: Rows, limit: float = 0.04, cap: float = 2.0) -> tuple[Rows, Rows]:
    """The largest is taken out again and again, until the mean of what is left is small enough."""
    left = sorted(x * x for row in rows for x in row)
    while left and sum(left) / len(left) > limit:
        left = [x for x in left if x < left[-1]]
    keep = [[bool(left) and x * x <= left[-1] for x in row] for row in rows]
    return truncate(rows, "token", cap)[0], keep


LEVELS = ["token", "sequence", "geometric"]
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("none", none, {}),
    ("truncate", truncate, {}),
    *[("truncate", truncate, {"level": level, "cap": 1.3}) for level in LEVELS],
    *[("truncate", truncate, {"level": level, "cap": 1.3, "normalise": True}) for level in LEVELS],
    ("truncate", truncate, {"floor": 0.8, "cap": 1.5}),
    ("mask", mask, {}),
    *[("mask", mask, {"level": level, "low": 0.8, "high": 1.5, "normalise": True}) for level in LEVELS],
    *[("mask", mask, {"level": level, "low": 0.8, "high": 1.5}) for level in LEVELS],
    *[("reject", reject, {"high": 1.3, "level": level}) for level in LEVELS],
    ("reject", reject, {"high": 1.3}),
    ("reject", reject, {"high": 1.5, "low": 0.9, "weights": "none"}),
    ("reject", reject, {"high": 1.5, "low": 0.9, "weights": "sequence", "cap": 1.2}),
    *[
        ("reject", reject, {"high": 0.3, "divergence": d, "level": level})
        for d in ("k2", "k3")
        for level in LEVELS
    ],
    ("m2po", m2po, {}),
    ("m2po", m2po, {"limit": 0.2, "cap": 1.1}),
    ("veto", veto, {}),
    ("veto", veto, {"low": 0.4, "high": 3.0, "cap": 1.1}),
]
IDS = [f"{name}-{params}" for name, _, params in CASES]


def correct(name: str, params: dict[str, Any], batch: TokenBatch) -> Correction:
    return registry.resolve("correction", name, params)(batch)


@pytest.mark.parametrize(("name", "oracle", "params"), CASES, ids=IDS)
@given(seed=st.integers(0, 10_000))
def test_weights_are_the_formula_written_out(name, oracle, params, seed):
    case = make_case(seed)
    correction = correct(name, params, case.batch)
    weights, keep = ([x for row in rows for x in row] for rows in oracle(log_ratios(case), **params))
    assert correction.keep_T.tolist() == keep
    assert correction.weights_T.tolist() == pytest.approx([w * k for w, k in zip(weights, keep, strict=True)])
    assert correction.metrics["rejected"] == keep.count(False)
    assert not correction.weights_T.requires_grad


@pytest.mark.parametrize("divergence", ["tv", "binary_kl", "binary_kl_max"])
@pytest.mark.parametrize("level", LEVELS)
@given(seed=st.integers(0, 10_000))
def test_rejection_by_probabilities_is_the_formula_written_out(divergence, level, seed):
    case = make_case(seed)
    params = {"high": 0.1, "divergence": divergence, "level": level}
    correction = correct("reject", {**params, "weights": "none"}, case.batch)
    _, keep = reject_probabilities(case, **params)
    assert correction.keep_T.tolist() == [x for row in keep for x in row]
    assert correction.weights_T.tolist() == correction.keep_T.tolist()


@pytest.mark.parametrize("divergence", ["tv", "binary_kl", "binary_kl_max"])
def test_two_outcomes_diverge_by_what_the_paper_says(divergence):
    """q 0.2, p 0.3: |p - q| is 0.1, KL(q || p) is 0.2 ln(2/3) + 0.8 ln(8/7) = 0.02573, KL(p || q) is 0.02817."""
    batch = batch_of([math.log(0.2)], [math.log(0.3)])
    value = {"tv": 0.1, "binary_kl": 0.0257314, "binary_kl_max": 0.0281680}[divergence]
    for high, kept in [(value + 1e-6, True), (value - 1e-6, False)]:
        assert correct("reject", {"high": high, "divergence": divergence}, batch).keep_T.tolist() == [kept]


@pytest.mark.parametrize("level", LEVELS)
def test_a_token_that_the_engine_rounds_above_certainty_is_kept(level):
    """Rounding gives log-probabilities of up to 0.01; the square root of a negative chance would be NaN."""
    for behaviour, proximal in [(0.009, -0.001), (-0.001, 0.009), (0.009, 0.009)]:
        batch = batch_of([behaviour, -1.0], [proximal, -1.0], [2])
        params = {"high": 0.05, "divergence": "binary_kl", "level": level}
        assert correct("reject", params, batch).keep_T.tolist() == [True, True]


def batch_of(behaviour: list[float], proximal: list[float], lengths: list[int] | None = None) -> TokenBatch:
    lengths = lengths or [1] * len(behaviour)
    return TokenBatch(
        sequence_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
        behaviour_logprobs_T=torch.tensor(behaviour),
        proximal_logprobs_T=torch.tensor(proximal),
        advantages_T=torch.ones(len(behaviour)),
    )


@pytest.mark.parametrize(("length", "count", "gap"), [(16_384, 2, 0.01), (400, 4, 0.3)])
@pytest.mark.parametrize("name", ["truncate", "mask"])
def test_long_answers_have_finite_normalised_weights(name, length, count, gap):
    """Ordinary data: a product over thousands of tokens underflows float32 long before any single ratio is
    far from 1."""
    tokens = length * count
    batch = batch_of([-1.0] * tokens, [-1.0 - gap] * tokens, [length] * count)
    weights_T = correct(name, {"level": "sequence", "normalise": True}, batch).weights_T
    assert torch.isfinite(weights_T).all()
    assert weights_T.tolist() == [1.0 if name == "truncate" else 0.0] * tokens


@pytest.mark.parametrize(
    ("name", "params"), [("truncate", {"cap": 1e-60}), ("mask", {"low": 30.0, "high": 40.0})]
)
def test_a_step_without_any_weight_keeps_zeros(name, params):
    batch = batch_of([-1.0, -2.0], [-1.5, -1.5])
    assert correct(name, {**params, "normalise": True}, batch).weights_T.tolist() == [0.0, 0.0]


OVER_STEP = [("m2po", {"limit": 0.05})]
OVER_STEP += [(name, {"level": one, "normalise": True}) for name in ("truncate", "mask") for one in LEVELS]


@pytest.mark.parametrize(("name", "params"), OVER_STEP)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_what_depends_on_the_whole_step_does_not_depend_on_how_it_was_cut(name, params, seed, data):
    """Not even with one sequence to a micro-batch, where a mean of its own would make every weight 1."""
    case = make_case(seed)
    order = data.draw(st.permutations(range(case.batch.num_sequences)))
    step = pick(case, order).batch
    correction = registry.resolve("correction", name, params)
    parts = [correction(pick(case, [index]).batch, step=step) for index in order]
    torch.testing.assert_close(
        torch.cat([part.weights_T for part in parts]), correct(name, params, step).weights_T
    )


def test_further_rejections_keep_the_weights_of_the_first():
    case = make_case(11, lengths=[20, 20, 20, 20])
    first = correct("truncate", {"cap": 1.2}, case.batch)
    others = [
        correct("mask", {"low": 0.6, "high": 1.6}, case.batch),
        correct("veto", {"low": 0.3, "high": 4.0}, case.batch),
    ]
    both = combined(first, others)
    keep_T = others[0].keep_T & others[1].keep_T
    assert 0 < keep_T.sum() < min(int(other.keep_T.sum()) for other in others)
    assert both.keep_T.tolist() == keep_T.tolist()
    torch.testing.assert_close(both.weights_T, first.weights_T * keep_T, atol=0, rtol=0)
    assert both.metrics == {"truncated": first.metrics["truncated"], "rejected": float((~keep_T).sum())}
    assert torch.equal(combined(first, []).weights_T, first.weights_T)


def test_tokens_of_equal_distance_are_rejected_together():
    """Squares 1/64, 1/16, 1/16, 1/4: with one of the equal two the mean would be below 0.04."""
    batch = batch_of([-1.0] * 4, [-1.125, -1.25, -0.75, -1.5])
    for limit, kept in [(0.04, [True, False, False, False]), (0.05, [True, True, True, False])]:
        assert correct("m2po", {"limit": limit}, batch).keep_T.tolist() == kept


def test_truncated_tokens_are_counted_on_both_sides():
    case = make_case(1, lengths=[30])
    for params in ({"cap": 1.3}, {"cap": 1.3, "floor": 0.9}):
        expected = sum(
            math.exp(x) > 1.3 or math.exp(x) < params.get("floor", 0.0) for x in log_ratios(case)[0]
        )
        assert 0 < expected < 30
        assert correct("truncate", params, case.batch).metrics["truncated"] == expected


@pytest.mark.parametrize(
    ("name", "oracle", "params"),
    [case for case in CASES if case[0] != "m2po" and not case[2].get("normalise")],
)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_cutting_and_permuting_a_batch_changes_nothing(name, oracle, params, seed, data):
    case = make_case(seed)
    order = data.draw(st.permutations(range(case.batch.num_sequences)))
    cut = data.draw(st.integers(0, len(order)))
    whole = correct(name, params, pick(case, order).batch)
    parts = [correct(name, params, pick(case, part).batch) for part in (order[:cut], order[cut:])]
    torch.testing.assert_close(torch.cat([part.weights_T for part in parts]), whole.weights_T)
    assert torch.cat([part.keep_T for part in parts]).tolist() == whole.keep_T.tolist()
    assert {key: sum(part.metrics[key] for part in parts) for key in whole.metrics} == whole.metrics


@pytest.mark.parametrize(("name", "oracle", "params"), CASES, ids=IDS)
@pytest.mark.parametrize("gap", [100.0, -100.0, math.inf, -math.inf])
def test_extreme_ratios_give_finite_weights(name, oracle, params, gap):
    batch = cast(make_case(2, lengths=[9, 0, 3]), torch.float32).batch
    behaviour_T = batch.behaviour_logprobs_T.clone()
    behaviour_T[[*range(8), 10]] -= gap  # e^160 is infinite in float32
    correction = correct(name, params, dataclasses.replace(batch, behaviour_logprobs_T=behaviour_T))
    assert torch.isfinite(correction.weights_T).all()
    assert (correction.weights_T >= 0).all()


@pytest.mark.parametrize(("name", "oracle", "params"), CASES, ids=IDS)
def test_on_policy_and_in_bypass_every_weight_is_one(name, oracle, params):
    """Synchronous training must not notice the correction, wherever its bounds include 1."""
    batch = make_case(3, lengths=[4, 0, 3]).batch
    for same in (
        dataclasses.replace(batch, proximal_logprobs_T=batch.behaviour_logprobs_T),
        dataclasses.replace(batch, proximal_logprobs_T=None),
    ):
        correction = correct(name, params, same)
        assert correction.weights_T.tolist() == pytest.approx([1.0] * 7)
        assert correction.keep_T.all()


@pytest.mark.parametrize(("name", "oracle", "params"), CASES, ids=IDS)
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_an_empty_batch_has_no_weights(name, oracle, params, lengths):
    correction = correct(name, params, make_case(1, lengths=lengths).batch)
    assert correction.weights_T.shape == (0,)
    assert set(merge([correction.metrics]).values()) == {0.0}


def test_bounds_are_inclusive():
    ratio_T = torch.tensor([0.5, 0.499999, 2.0, 2.00001], dtype=torch.float64)
    batch = TokenBatch(
        sequence_T=torch.arange(4),
        num_sequences=4,
        behaviour_logprobs_T=torch.zeros(4, dtype=torch.float64),
        proximal_logprobs_T=ratio_T.log(),
        advantages_T=torch.ones(4),
    )
    assert correct("mask", {"low": 0.5 - 1e-9, "high": 2.0 + 1e-9}, batch).keep_T.tolist() == [
        True,
        False,
        True,
        False,
    ]


def test_every_registered_correction_is_tested_here():
    assert {name for name, _, _ in CASES} == set(registry.names("correction"))
