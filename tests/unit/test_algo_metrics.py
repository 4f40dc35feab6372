"""Metrics: raw ratios against plain floats, and sums that add up however the batch was cut."""

import dataclasses
import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.metrics import BANDS, finish, group_metrics, length_bands, merge, policy_metrics
from tests.support.algo_cases import Case, cast, make_case, make_rewards, pick, rows


def mean(values):
    return sum(values) / len(values)


def bounded(value: float) -> float:
    return max(-20.0, min(20.0, value))


def expected_pair(by_sequence: list[list[float]]) -> dict[str, float]:
    """Published numbers of a pair from ln(to / from) of every sequence's tokens, sampled from `from`."""
    by_sequence = [[bounded(d) for d in sequence] for sequence in by_sequence if sequence]
    differences = [d for sequence in by_sequence for d in sequence]
    ratios = [math.exp(d) for d in differences]
    return {
        "k1": -mean(differences),
        "k3": mean([r - 1 - d for r, d in zip(ratios, differences, strict=True)]),
        "ratio": mean(ratios),
        "ess": sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios),
        "tail_high": mean([r > 2 for r in ratios]),
        "tail_low": mean([r < 0.5 for r in ratios]),
        "ratio/max": max(ratios),
        "ratio/min": min(ratios),
        "chi2_token": mean([r * r for r in ratios]) - 1,
        "chi2_sequence": mean([math.exp(2 * bounded(sum(sequence))) - 1 for sequence in by_sequence]),
        "perplexity_ratio": mean([math.exp(-mean(sequence)) for sequence in by_sequence]),
        "abs_log_ratio/max": max(map(abs, differences)),
    }


@given(seed=st.integers(0, 10_000), proximal=st.booleans())
def test_published_metrics_are_the_formulas_written_out(seed, proximal):
    case = make_case(seed, proximal=proximal, lengths=[4, 0, 3, 2])
    published = finish(policy_metrics(case.batch, case.logprobs_T, case.entropy_T))
    by_sequence = [row for row in rows(case) if row]
    flat = [token for row in by_sequence for token in row]
    advantages = [t.advantage for t in flat]
    expected = {
        "tokens": 9.0,
        "sequences": 3.0,
        "policy/logprob": mean([t.logprob for t in flat]),
        "policy/entropy": mean([t.entropy for t in flat]),
        "perplexity/behaviour": mean([math.exp(-mean([t.behaviour for t in row])) for row in by_sequence]),
        "perplexity/proximal": mean([math.exp(-mean([t.anchor for t in row])) for row in by_sequence]),
        "perplexity/current": mean([math.exp(-mean([t.logprob for t in row])) for row in by_sequence]),
        "advantage/mean": mean(advantages),
        "advantage/std": statistics.pstdev(advantages),
        "advantage/abs": mean([abs(a) for a in advantages]),
        "advantage/positive": mean([a > 0 for a in advantages]),
        "advantage/max": max(advantages),
        "advantage/min": min(advantages),
        "weight/mean": mean([t.weight for t in flat]),
        "weight/zero": 0.0,
        "weight/max": max(t.weight for t in flat),
        "lag/mean": mean(case.batch.lag_T.tolist()),
        "lag/stale": mean([lag > 0 for lag in case.batch.lag_T.tolist()]),
        "lag/max": max(case.batch.lag_T.tolist()),
    }
    pairs = {
        "mismatch": [[t.anchor - t.behaviour for t in row] for row in by_sequence],
        "policy": [[t.logprob - t.anchor for t in row] for row in by_sequence],
        "drift": [[t.logprob - t.behaviour for t in row] for row in by_sequence],
    }
    expected |= {
        f"{pair}/{key}": value for pair, ds in pairs.items() for key, value in expected_pair(ds).items()
    }
    # A spread of 0 is known to half the digits.
    assert published == pytest.approx(expected, rel=1e-9, abs=1e-7)


@given(seed=st.integers(0, 10_000), data=st.data())
def test_micro_batches_and_ranks_add_up_to_the_whole(seed, data):
    case = make_case(seed)
    order = data.draw(st.permutations(range(case.batch.num_sequences)))
    cut = data.draw(st.integers(0, len(order)))
    parts = [pick(case, order[:cut]), pick(case, order[cut:])]

    def measured(part: Case) -> dict[str, torch.Tensor]:
        left_out_T = part.entropy_T > 1.0
        return policy_metrics(
            part.batch, part.logprobs_T, part.entropy_T, left_out_T=left_out_T, max_response_tokens=5
        )

    merged, whole = merge(map(measured, parts)), merge([measured(case)])
    assert merged == pytest.approx(whole)
    # A standard deviation is the root of a difference of sums.
    assert finish(merged) == pytest.approx(finish(whole), abs=1e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("proximal", [True, False])
def test_an_infinite_column_gives_finite_metrics(value, proximal):
    """Without a proximal column the behaviour column stands on both sides: the mismatch ratio is 1."""
    case = make_case(5, lengths=[3, 2], proximal=proximal)
    behaviour_T = case.batch.behaviour_logprobs_T.clone()
    behaviour_T[1] = value
    reference_T = torch.tensor([-1.0, value, -30.0, -1.0, -1.0])
    batch = dataclasses.replace(
        case.batch, behaviour_logprobs_T=behaviour_T, reference_logprobs_T=reference_T
    )
    published = finish(policy_metrics(batch, case.logprobs_T))
    assert all(map(math.isfinite, published.values()))
    assert published["reference/nll"] == pytest.approx((1 + math.copysign(20, -value) + 20 + 1 + 1) / 5)
    if not proximal:
        assert (published["mismatch/ratio"], published["mismatch/k1"]) == (1.0, 0.0)


def test_a_maximum_with_nan_is_nan_in_any_order():
    parts = [{"a/max": 1.0}, {"a/max": float("nan")}, {"a/max": 2.0}]
    assert all(math.isnan(merge(order)["a/max"]) for order in itertools.permutations(parts))


def test_a_minimum_is_the_smallest_and_nan_stays():
    assert merge([{"a/min": 1.0}, {"a/min": -2.0}, {"a/min": 3.0}]) == {"a/min": -2.0}
    parts = [{"a/min": 1.0}, {"a/min": float("nan")}, {"a/min": 2.0}]
    assert all(math.isnan(merge(order)["a/min"]) for order in itertools.permutations(parts))


def test_thirds_of_the_limit_are_the_lengths_that_are_short_medium_and_long():
    assert length_bands(torch.tensor([0, 1, 3, 4, 6, 7, 9, 12]), 9).tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert length_bands(torch.arange(1, 11), 10).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert length_bands(torch.tensor([1, 2]), 1).tolist() == [2, 2]


@pytest.mark.parametrize("limit", [3, 9, 100])
def test_what_is_dropped_is_told_by_the_length_of_its_response(limit):
    """A correction that rejects only the tokens of long responses looks harmless in the mean."""
    case = make_case(7, lengths=[2, 9, 0, 5, 3])
    thirds = [2 / limit, 9 / limit, 0, 5 / limit, 3 / limit]
    band = {
        s: "short" if third <= 1 / 3 else "medium" if third <= 2 / 3 else "long"
        for s, third in enumerate(thirds)
    }
    draw = torch.Generator().manual_seed(1)
    weights_T = torch.randint(0, 2, (19,), generator=draw).double()
    left_out_T = torch.rand(19, generator=draw) < 0.4
    batch = dataclasses.replace(case.batch, weights_T=weights_T)
    published = finish(
        policy_metrics(batch, case.logprobs_T, left_out_T=left_out_T, max_response_tokens=limit)
    )
    for name in BANDS:
        tokens = [t for t, s in enumerate(batch.sequence_T.tolist()) if band[s] == name]
        assert published[f"tokens/{name}"] == len(tokens)
        for metric, dropped_T in (("weight/zero", weights_T == 0), ("policy/left_out", left_out_T)):
            share = mean([float(dropped_T[t]) for t in tokens]) if tokens else 0.0
            assert published[f"{metric}/{name}"] == pytest.approx(share)
    counts = [published[f"tokens/{name}"] for name in BANDS]
    parts = [published[f"weight/zero/{name}"] for name in BANDS]
    assert sum(n * p for n, p in zip(counts, parts, strict=True)) == pytest.approx(
        published["weight/zero"] * 19
    )


def test_without_a_limit_nothing_is_told_by_length():
    case = make_case(7, lengths=[2])
    assert not any(
        name.endswith(BANDS) for name in policy_metrics(case.batch, case.logprobs_T, case.entropy_T)
    )


def test_merge_takes_maxima_of_maxima_and_keeps_names_that_only_one_has():
    merged = merge(
        [{"a": 1.0, "b/max": -5.0, "c/max": 9.0}, {"a": 2.0, "b/max": -7.0, "d": 4.0}, {"c/max": 3.0}]
    )
    assert merged == {"a": 3.0, "b/max": -5.0, "c/max": 9.0, "d": 4.0}


def test_the_ratio_is_raw():
    """A truncated ratio could not show its tail: the weights' cap must not reach the metrics."""
    case = make_case(1, lengths=[4])
    behaviour_T = case.batch.anchor_logprobs_T - torch.tensor([0.0, 0.0, 0.0, 5.0])
    batch = dataclasses.replace(
        case.batch, behaviour_logprobs_T=behaviour_T, weights_T=torch.tensor([1.0, 1.0, 0.0, 2.0])
    )
    published = finish(policy_metrics(batch, case.logprobs_T))
    assert published["mismatch/ratio/max"] == pytest.approx(math.exp(5))
    assert published["mismatch/ess"] == pytest.approx((3 + math.exp(5)) ** 2 / (3 + math.exp(10)) / 4)
    assert published["mismatch/tail_high"] == 0.25
    assert published["weight/zero"] == 0.25
    assert "policy/entropy" not in published


def test_on_policy_everything_is_at_rest():
    case = make_case(2, lengths=[5, 3])
    same_T = case.batch.behaviour_logprobs_T
    published = finish(policy_metrics(dataclasses.replace(case.batch, proximal_logprobs_T=same_T), same_T))
    for pair in ("mismatch", "policy", "drift"):
        assert published[f"{pair}/ess"] == pytest.approx(1.0)
        assert published[f"{pair}/ratio"] == 1.0
        assert published[f"{pair}/k1"] == published[f"{pair}/k3"] == published[f"{pair}/chi2_sequence"] == 0.0
        assert published[f"{pair}/perplexity_ratio"] == 1.0
        assert published[f"{pair}/chi2_token"] == pytest.approx(0.0)
    assert (
        published["perplexity/behaviour"]
        == published["perplexity/proximal"]
        == published["perplexity/current"]
    )


def test_extremes_are_finite():
    case = cast(make_case(3, lengths=[4, 2]), torch.float32)
    behaviour_T = torch.tensor([math.inf, -math.inf, 100.0, -100.0, -1.0, -1.0])
    published = finish(
        policy_metrics(dataclasses.replace(case.batch, behaviour_logprobs_T=behaviour_T), case.logprobs_T)
    )
    assert all(math.isfinite(value) for value in published.values())
    assert published["mismatch/abs_log_ratio/max"] == 20.0
    # 20 - 20 + 20 - 20, and -1 twice.
    assert published["perplexity/behaviour"] == pytest.approx((1 + math.e) / 2)


def test_the_ratio_of_a_whole_response_is_bounded_however_long_it_is():
    case = make_case(1, lengths=[200])
    published = finish(policy_metrics(case.batch, case.batch.behaviour_logprobs_T + 10.0))
    assert published["drift/chi2_sequence"] == pytest.approx(math.expm1(40.0))


def test_the_perplexity_of_a_uniform_policy_is_the_size_of_its_vocabulary():
    """Mean over responses, however long they are."""
    case = make_case(1, lengths=[3, 1])
    current_T = torch.tensor([-math.log(50)] * 3 + [-math.log(10)])
    assert finish(policy_metrics(case.batch, current_T))["perplexity/current"] == pytest.approx(30.0)


def test_columns_that_are_missing_are_left_out():
    case = make_case(4, lengths=[2])
    bare = dataclasses.replace(case.batch, weights_T=None, lag_T=None)
    names = set(finish(policy_metrics(bare, case.logprobs_T)))
    assert not any(name.startswith(("weight", "lag", "reference")) for name in names)


def test_an_empty_micro_batch_adds_nothing():
    empty = make_case(1, lengths=[0])
    sums = merge([policy_metrics(empty.batch, empty.logprobs_T, empty.entropy_T)])
    assert set(sums.values()) == {0.0}
    assert not any(name.endswith(("/max", "/min")) for name in sums)
    assert finish(sums)["mismatch/ess"] == finish(sums)["mismatch/chi2_token"] == 0.0


def test_the_distance_to_the_reference_is_k3():
    case = make_case(5, lengths=[3])
    reference_T = case.logprobs_T + torch.tensor([0.5, -1.0, 0.0])
    published = finish(
        policy_metrics(dataclasses.replace(case.batch, reference_logprobs_T=reference_T), case.logprobs_T)
    )
    assert published["reference/k3"] == pytest.approx(
        (math.exp(0.5) - 1 - 0.5 + math.exp(-1.0) - 1 + 1.0) / 3
    )
    assert published["reference/nll"] == pytest.approx(-float(reference_T.mean()))


def test_metrics_carry_no_graph():
    case = make_case(6, lengths=[3])
    sums = policy_metrics(case.batch, case.logprobs_T.requires_grad_())
    assert not any(value.requires_grad for value in sums.values())


def test_a_loss_s_sums_become_shares_of_tokens():
    published = finish({"tokens": 8.0, "clipped_low": 2.0, "clipped_high": 1.0, "rejected": 4.0})
    assert published == {"tokens": 8.0, "clipped_low": 0.25, "clipped_high": 0.125, "rejected": 0.5}


@pytest.mark.parametrize("name", ["square", "ratio_square", "group/square", "x/ratio_square", "std", "mean"])
def test_a_loss_may_call_its_sum_as_it_likes(name):
    assert finish({"tokens": 8.0, f"mine/{name}": 2.0}) == {"tokens": 8.0, f"mine/{name}": 0.25}


def test_group_metrics_count_each_group_once():
    rewards = dataclasses.replace(
        make_rewards(1, sizes=[1, 3, 2]), rewards_S=torch.tensor([0.5, 1.0, 1.0, 1.0, 0.0, 1.0])
    )
    published = finish(merge([group_metrics(rewards)]))
    values = [0.5, 1, 1, 1, 0, 1]
    assert published == pytest.approx(
        {
            "groups": 3.0,
            "group/singleton": 1 / 3,
            "group/zero_variance": 1 / 3,  # a group of one has nothing to compare
            "group/reward_std": math.sqrt(0.5) / 3,
            "reward/mean": mean(values),
            "reward/std": math.sqrt(mean([v * v for v in values]) - mean(values) ** 2),
            "reward/min": 0.0,
            "reward/max": 1.0,
        }
    )


def test_group_metrics_of_ranks_add_up():
    both = [make_rewards(seed) for seed in (3, 4)]
    sums = [group_metrics(rewards) for rewards in both]
    published = finish(merge(sums))
    everything = torch.cat([rewards.totals_S for rewards in both])
    assert published["reward/mean"] == pytest.approx(everything.mean().item())
    assert published["reward/std"] == pytest.approx(everything.std(correction=0).item())
    assert (published["reward/min"], published["reward/max"]) == (
        everything.min().item(),
        everything.max().item(),
    )
    assert published["groups"] == sum(rewards.num_groups for rewards in both)


def test_rewards_are_equal_whatever_the_tokens_pay_for_the_divergence():
    rewards = make_rewards(1, sizes=[3, 2], token_rewards=True)
    rewards = dataclasses.replace(rewards, rewards_S=torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]))
    published = finish(merge([group_metrics(rewards)]))
    assert published["group/zero_variance"] == pytest.approx(0.5) and published["group/reward_std"] > 0.0
