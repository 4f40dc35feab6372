"""Importance weights against their formulas, at their bounds, and against their invariants."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from algo_cases import Case, cast, make_case, pick
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo import registry
from asyncrl.algo.corrections import Correction
from asyncrl.algo.tokens import TokenBatch

Rows = list[list[float]]
"""[sequence][token]"""


def log_ratios(case: Case) -> Rows:
    batch = case.batch
    found: Rows = [[] for _ in range(batch.num_sequences)]
    for s, to, of in zip(
        batch.sequence_T.tolist(), batch.anchor_logprobs_T.tolist(), batch.behaviour_logprobs_T.tolist(), strict=True
    ):
        found[s].append(max(-20.0, min(20.0, to - of)))
    return found


def at_level(rows: Rows, level: str, function: Callable[[float], float] = math.exp) -> Rows:
    """The ratio (or a divergence) of each token at a level."""
    if level == "token":
        return [[function(x) for x in row] for row in rows]
    return [[function(sum(row) / (max(1, len(row)) if level == "geometric" else 1))] * len(row) for row in rows]


def spread(rows: Rows, level: str, function: Callable[[float], float]) -> Rows:
    """A divergence of each token, summed or averaged over the sequence."""
    if level == "token":
        return [[function(x) for x in row] for row in rows]
    return [[sum(map(function, row)) / (max(1, len(row)) if level == "geometric" else 1)] * len(row) for row in rows]


def none(rows: Rows) -> tuple[Rows, Rows]:
    return at_level(rows, "token", lambda x: 1.0), at_level(rows, "token", lambda x: True)


def truncate(rows: Rows, level: str = "token", cap: float = 2.0, normalise: bool = False) -> tuple[Rows, Rows]:
    weights = [[min(w, cap) for w in row] for row in at_level(rows, level)]
    if normalise:
        counted = [w for row in weights for w in (row if level == "token" else row[:1])]
        weights = [[w * len(counted) / sum(counted) for w in row] for row in weights]
    return weights, none(rows)[1]


def mask(rows: Rows, level: str = "token", low: float = 0.5, high: float = 5.0) -> tuple[Rows, Rows]:
    ratios = at_level(rows, level)
    return ratios, [[low <= r <= high for r in row] for row in ratios]


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


def veto(rows: Rows, low: float = 1e-4, high: float = 1e4, cap: float = 2.0) -> tuple[Rows, Rows]:
    ratios = at_level(rows, "token")
    return truncate(rows, "token", cap)[0], [[all(low <= r <= high for r in row)] * len(row) for row in ratios]


LEVELS = ["token", "sequence", "geometric"]
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("none", none, {}),
    ("truncate", truncate, {}),
    *[("truncate", truncate, {"level": level, "cap": 1.3}) for level in LEVELS],
    *[("truncate", truncate, {"level": level, "cap": 1.3, "normalise": True}) for level in LEVELS],
    ("mask", mask, {}),
    *[("mask", mask, {"level": level, "low": 0.8, "high": 1.5}) for level in LEVELS],
    *[("reject", reject, {"high": 1.3, "level": level}) for level in LEVELS],
    ("reject", reject, {"high": 1.3}),
    ("reject", reject, {"high": 1.5, "low": 0.9, "weights": "none"}),
    ("reject", reject, {"high": 1.5, "low": 0.9, "weights": "sequence", "cap": 1.2}),
    *[("reject", reject, {"high": 0.3, "divergence": d, "level": level}) for d in ("k2", "k3") for level in LEVELS],
    ("veto", veto, {}),
    ("veto", veto, {"low": 0.4, "high": 3.0, "cap": 1.1}),
]
IDS = [f"{name}-{params}" for name, _, params in CASES]


def correct(name: str, params: dict[str, Any], batch: TokenBatch) -> Correction:
    return registry.resolve("correction", name, params)(batch)


@pytest.mark.parametrize(("name", "oracle", "params"), CASES, ids=IDS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_weights_are_the_formula_written_out(name, oracle, params, seed):
    case = make_case(seed)
    correction = correct(name, params, case.batch)
    weights, keep = ([x for row in rows for x in row] for rows in oracle(log_ratios(case), **params))
    assert correction.keep_T.tolist() == keep
    assert correction.weights_T.tolist() == pytest.approx([w * k for w, k in zip(weights, keep, strict=True)])
    assert correction.metrics["rejected"] == keep.count(False)
    assert not correction.weights_T.requires_grad


def test_truncated_tokens_are_counted():
    case = make_case(1, lengths=[30])
    expected = sum(math.exp(x) > 1.3 for x in log_ratios(case)[0])
    assert 0 < expected < 30
    assert correct("truncate", {"cap": 1.3}, case.batch).metrics["truncated"] == expected


@pytest.mark.parametrize(("name", "oracle", "params"), [c for c in CASES if not c[2].get("normalise")])
@settings(max_examples=10, deadline=None)
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
    assert set(correction.metrics.values()) == {0.0}


def test_bounds_are_inclusive():
    ratio_T = torch.tensor([0.5, 0.499999, 2.0, 2.00001], dtype=torch.float64)
    batch = TokenBatch(
        sequence_T=torch.arange(4),
        num_sequences=4,
        behaviour_logprobs_T=torch.zeros(4, dtype=torch.float64),
        proximal_logprobs_T=ratio_T.log(),
        advantages_T=torch.ones(4),
    )
    assert correct("mask", {"low": 0.5 - 1e-9, "high": 2.0 + 1e-9}, batch).keep_T.tolist() == [True, False, True, False]


def test_every_registered_correction_is_tested_here():
    assert {name for name, _, _ in CASES} == set(registry.names("correction"))
