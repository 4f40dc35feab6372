"""The definitions of GRPO, DAPO and Dr. GRPO written out; how a batch is cut changes no aggregation."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.aggregation import Counts
from asyncrl.config import registry
from tests.support.algo_cases import Case, make_case, pick

Rows = list[list[float]]


def loss_rows(case: Case) -> Rows:
    """The log-probabilities serve as losses."""
    found: Rows = [[] for _ in range(case.batch.num_sequences)]
    for s, value in zip(case.batch.sequence_T.tolist(), case.logprobs_T.tolist(), strict=True):
        found[s].append(value)
    return found


def total(rows: Rows) -> float:
    return sum(x for row in rows for x in row)


def filled(rows: Rows) -> Rows:
    return [row for row in rows if row]


ORACLES = {
    "token-mean": lambda rows: total(rows) / max(1, sum(map(len, rows))),
    "token-sum": total,
    "seq-mean-token-sum": lambda rows: total(rows) / max(1, len(filled(rows))),
    "seq-mean-token-mean": lambda rows: (
        sum(sum(row) / len(row) for row in filled(rows)) / max(1, len(filled(rows)))
    ),
    "seq-mean-token-sum-norm": lambda rows: total(rows) / max(1, len(filled(rows))) / 7.0,
}


def aggregate(name: str, case: Case, counts: Counts) -> torch.Tensor:
    params = {"scale": 7.0} if name == "seq-mean-token-sum-norm" else {}
    return registry.resolve("aggregation", name, params)(case.logprobs_T, case.batch, counts)


@pytest.mark.parametrize("name", registry.names("aggregation"))
@given(seed=st.integers(0, 10_000))
def test_aggregation_is_the_formula_written_out(name, seed):
    case = make_case(seed)
    assert aggregate(name, case, Counts.of(case.batch)).item() == pytest.approx(
        ORACLES[name](loss_rows(case)), abs=1e-12
    )


@given(seed=st.integers(0, 10_000))
def test_the_mean_of_a_sequence_is_the_formula_and_0_without_tokens(seed):
    case = make_case(seed)
    expected = [sum(row) / len(row) if row else 0.0 for row in loss_rows(case)]
    assert case.batch.mean_S(case.logprobs_T).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", registry.names("aggregation"))
@given(seed=st.integers(0, 10_000), data=st.data())
def test_micro_batches_add_up_to_the_whole(name, seed, data):
    case = make_case(seed)
    order = data.draw(st.permutations(range(case.batch.num_sequences)))
    cut = data.draw(st.integers(0, len(order)))
    parts = [pick(case, order[:cut]), pick(case, order[cut:])]
    counts = Counts.of(case.batch)
    summed = sum(aggregate(name, part, counts).item() for part in parts)
    assert summed == pytest.approx(aggregate(name, case, counts).item(), abs=1e-12)


@pytest.mark.parametrize("name", registry.names("aggregation"))
def test_empty_sequences_are_in_no_denominator(name):
    full, sparse = make_case(5, lengths=[3, 2]), make_case(5, lengths=[0, 3, 0, 2, 0])
    sparse = sparse._replace(logprobs_T=full.logprobs_T)
    assert Counts.of(sparse.batch) == Counts(tokens=5, sequences=2)
    assert aggregate(name, sparse, Counts.of(sparse.batch)) == aggregate(name, full, Counts.of(full.batch))


@pytest.mark.parametrize("name", registry.names("aggregation"))
def test_rejecting_tokens_does_not_make_the_others_heavier(name):
    case = make_case(6, lengths=[3, 2])
    counts = Counts.of(case.batch)
    keep_T = torch.tensor([True, False, True, True, False])
    logprobs_T = case.logprobs_T.clone().requires_grad_()
    kept = case._replace(logprobs_T=torch.where(keep_T, logprobs_T, 0.0))
    aggregate(name, kept, counts).backward()
    rejected_gradient_T = logprobs_T.grad.clone()
    logprobs_T.grad = None
    aggregate(name, case._replace(logprobs_T=logprobs_T), counts).backward()
    torch.testing.assert_close(rejected_gradient_T, torch.where(keep_T, logprobs_T.grad, 0.0))


@pytest.mark.parametrize("name", registry.names("aggregation"))
@pytest.mark.parametrize("lengths", [[], [0]])
def test_nothing_to_sum_is_zero(name, lengths):
    case = make_case(1, lengths=lengths)
    assert aggregate(name, case, Counts(0, 0)).item() == 0.0


def test_the_weight_of_a_token():
    """A token's share of the loss, for one sequence of 4 tokens and one of 1."""
    case = make_case(2, lengths=[4, 1])
    expected = {
        "token-mean": [1 / 5, 1 / 5],
        "token-sum": [1, 1],
        "seq-mean-token-sum": [1 / 2, 1 / 2],
        "seq-mean-token-mean": [1 / 8, 1 / 2],
        "seq-mean-token-sum-norm": [1 / 14, 1 / 14],
    }
    for name, weights in expected.items():
        logprobs_T = case.logprobs_T.clone().requires_grad_()
        aggregate(name, case._replace(logprobs_T=logprobs_T), Counts.of(case.batch)).backward()
        assert logprobs_T.grad.tolist() == pytest.approx([weights[0]] * 4 + [weights[1]]), name


def test_the_sum_of_many_tokens_in_float32_is_exact_enough():
    case = make_case(3, lengths=[4096] * 8)
    counts = Counts.of(case.batch)
    for name in registry.names("aggregation"):
        exact = aggregate(name, case, counts).item()
        float32 = aggregate(name, case._replace(logprobs_T=case.logprobs_T.float()), counts).item()
        assert float32 == pytest.approx(exact, rel=1e-5), name


def test_sums_along_long_sequences_keep_their_precision():
    """One after the other in float32, 100,000 times 0.01 is 1000.67."""
    batch = dataclasses.replace(
        make_case(1, lengths=[100_000, 0, 5_000], proximal=False).batch, weights_T=None
    )
    values_T = torch.full((105_000,), 0.01, requires_grad=True)
    sums_S = batch.sum_S(values_T)
    assert sums_S.dtype == torch.float32
    assert sums_S.tolist() == pytest.approx([1000.0, 0.0, 50.0], rel=1e-6)
    sums_S.sum().backward()
    assert values_T.grad is not None and values_T.grad.dtype == torch.float32 and (values_T.grad == 1.0).all()
