"""Group filters on plain floats."""

import dataclasses

import pytest

from asyncrl.algo.filters import GroupOutcome
from asyncrl.config import registry


def outcome(*rewards: float) -> GroupOutcome:
    return GroupOutcome(rewards=rewards, lengths=(3,) * len(rewards), finish_reasons=("stop",) * len(rewards))


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((1.0, 1.0, 1.0), "zero_variance"),
        ((0.0, 0.0), "zero_variance"),
        ((0.1 + 0.2, 0.3), "zero_variance"),  # a weighted sum of parts is not bit-equal
        ((-5.0, -5.0), "zero_variance"),
        ((0.0, 1.0), None),
        ((0.0, 1e-3), None),
        ((1.0, 1.0, 0.0), None),
        ((0.0, 1.0, 1.0), None),
        ((1.0,), None),  # nothing to compare with: rejecting would reject all
    ],
)
def test_zero_variance(rewards, reason):
    assert registry.resolve("filter", "zero_variance", {})(outcome(*rewards)) == reason


def test_the_rest_of_a_group_whose_other_episodes_are_missing_has_no_signal():
    judged = registry.resolve("filter", "zero_variance", {})
    assert judged(dataclasses.replace(outcome(1.0), missing=1)) == "zero_variance"
    assert judged(dataclasses.replace(outcome(1.0, 0.0), missing=1)) is None


def test_zero_variance_tolerance_is_inclusive():
    resolve = registry.resolve
    assert resolve("filter", "zero_variance", {"tolerance": 0.5})(outcome(0.0, 0.5)) == "zero_variance"
    assert resolve("filter", "zero_variance", {"tolerance": 0.25})(outcome(0.0, 0.5)) is None
    assert resolve("filter", "zero_variance", {"tolerance": 0})(outcome(0.5, 0.5)) == "zero_variance"


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 0.0), "reward_too_low"),
        ((0.0, 0.5), "reward_too_low"),  # the mean is the bound
        ((0.0, 1.0), None),
        ((0.6, 1.0), "reward_too_high"),
        ((1.0, 1.0), "reward_too_high"),
    ],
)
def test_reward_range_is_strict(rewards, reason):
    assert registry.resolve("filter", "reward_range", {"low": 0.25, "high": 0.8})(outcome(*rewards)) == reason
