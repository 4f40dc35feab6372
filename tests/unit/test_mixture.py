"""Mixtures of sources: shares are exact after every ticket, and follow from the ticket's number alone."""

from collections import Counter
from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.data_section import DataConfig
from asyncrl.data.sample_plan import SamplePlan, Shares, make_mixture

weights = st.lists(st.integers(1, 9) | st.integers(1, 10_000), min_size=1, max_size=9)


def shares_of(weights: list[int]) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


@given(weights)
def test_after_every_ticket_each_source_is_within_less_than_one_ticket_of_its_share(weights):
    """The bound is Tijdeman's, 1 - 1 / (2k - 2), which no rule improves for every k shares."""
    expected, bound = shares_of(weights), 1 - Fraction(1, max(2 * len(weights) - 2, 1))
    shares, counts = Shares(expected), [0] * len(weights)
    for ticket_id in range(1, 501):
        counts[shares.source(ticket_id)] += 1
        assert all(abs(n - ticket_id * w) <= bound for n, w in zip(counts, expected, strict=True))
        assert [shares.count(source, ticket_id) for source in range(len(weights))] == counts


@given(weights, st.integers(0, 3000), st.integers(0, 300))
def test_the_number_alone_decides_and_successive_tickets_are_bounded(weights, start, length):
    asked, walked = Shares(shares_of(weights)), Shares(shares_of(weights))
    found = asked.source(start + length + 1)
    assert found == [walked.source(ticket_id) for ticket_id in range(1, start + length + 2)][-1]
    for source in range(len(weights)):
        between = asked.count(source, start + length) - asked.count(source, start)
        assert between <= asked.most(source, length)


def test_the_choice_is_what_it_always_was():
    assert [Shares(shares_of([7, 3])).source(one) for one in range(1, 13)] == [
        0,
        1,
        0,
        0,
        0,
        1,
        0,
        0,
        1,
        0,
        0,
        1,
    ]
    assert [Shares(shares_of([5, 3, 1])).source(one) for one in range(1, 10)] == [0, 1, 0, 1, 0, 0, 2, 0, 1]
    assert Shares(shares_of([1000, 1, 77])).count(2, 10**9) == 71_428_571


@pytest.mark.parametrize(("weights", "shards", "is_even"), [([1, 1], 2, False), ([1, 3], 3, True)])
def test_a_shard_has_the_shares_of_the_whole_if_its_turns_and_the_period_have_no_common_factor(
    weights, shards, is_even
):
    """The warning in `preflight.doubts` relies on it."""
    shares, count = Shares(shares_of(weights)), shards * sum(weights)
    parts = [Counter(map(shares.source, range(first, count + 1, shards))) for first in range(1, shards + 1)]
    assert (parts == [dict(enumerate(weights))] * shards) == is_even


def test_7_to_3_over_10_000_tickets_with_three_resumes_is_exact():
    data = DataConfig.model_validate(
        {"train": [{"path": "a", "weight": 0.7}, {"path": "b", "weight": 0.3}], "shuffle": True}
    )
    sizes = [1000, 7]
    found: list[int] = []
    for stop in (1, 3333, 7001, 10_000):
        # A resume knows the config and the rows, and goes on behind the tickets that are done.
        mixture = make_mixture(data, sizes, seed=5)
        found += [mixture.row(ticket_id) for ticket_id in range(len(found) + 1, stop + 1)]
    first = [row for row in found if row < 1000]
    assert (len(first), len(found)) == (7000, 10_000)
    for ticket_id, count in enumerate(accumulate(row < 1000 for row in found), start=1):
        assert abs(10 * count - 7 * ticket_id) <= 5, ticket_id
    # Within a source the order is that of a run with this source alone.
    second = [row - 1000 for row in found if row >= 1000]
    for rows, size in ((first, 1000), (second, 7)):
        plan = SamplePlan(size, seed=5, shuffle=True)
        assert rows == [plan.row(number) for number in range(1, len(rows) + 1)]
    assert set(Counter(second).values()) <= {428, 429}


@pytest.mark.parametrize("shuffle", [True, False])
def test_one_source_is_the_sample_plan(shuffle):
    data = DataConfig.model_validate({"train": "a", "shuffle": shuffle})
    mixture, plan = make_mixture(data, [30], seed=2), SamplePlan(30, seed=2, shuffle=shuffle)
    assert [mixture.row(n) for n in range(1, 100)] == [plan.row(n) for n in range(1, 100)]


def test_shares_are_those_of_the_weights_as_written():
    def shares(*weights: float) -> list[Fraction]:
        train = [{"path": f"p{index}", "weight": weight} for index, weight in enumerate(weights)]
        return DataConfig.model_validate({"train": train}).shares

    assert shares(0.7, 0.3) == shares(7, 3) == [Fraction(7, 10), Fraction(3, 10)]
    assert shares(0.1, 0.2) == [Fraction(1, 3), Fraction(2, 3)] and shares(1e-5, 1) == [
        Fraction(1, 100_001),
        Fraction(100_000, 100_001),
    ]
