"""KL and entropy under control: the rules against their definitions, and a state that survives a restart."""

import json
import math

import pytest

from asyncrl.batch.coefficients import Coefficients, adapt_bonus
from asyncrl.config.algorithm import EntropyConfig, KLConfig
from asyncrl.trainer.base import StepResult

STEERED = (
    KLConfig(coefficient=0.1, target=0.05, horizon=100.0),
    EntropyConfig(coefficient=0.01, target=1.0, step=0.004, maximum=0.016),
)


def result(*, kl: float = math.nan, entropy: float = math.nan, tokens: int = 10) -> StepResult:
    sums = {"tokens": float(tokens), "policy/kl_reference": kl * tokens, "policy/entropy": entropy * tokens}
    return StepResult(metrics=sums, grad_norm=1.0, lr=1e-6)


@pytest.mark.parametrize(
    ("coefficient", "entropy", "expected"),
    [(0.01, 0.5, 0.015), (0.01, 1.5, 0.005), (0.01, 1.0, 0.01), (0.099, 0.5, 0.1), (0.002, 1.5, 0.0)],
)
def test_the_bonus_grows_below_the_target_falls_above_and_stays_in_bounds(coefficient, entropy, expected):
    assert adapt_bonus(coefficient, entropy, target=1.0, step=0.005, maximum=0.1) == pytest.approx(expected)


@pytest.mark.parametrize(("entropy", "acts"), [(0.5, True), (1.0, True), (1.001, False), (math.inf, False)])
def test_the_bonus_acts_at_and_below_the_target(entropy, acts):
    coefficients = Coefficients(*STEERED)
    coefficients.resume({"entropy": 0.012, "measured_entropy": entropy})
    assert coefficients.entropy == (0.012 if acts else 0.0)


def test_both_are_steered_by_what_a_step_measured():
    coefficients = Coefficients(*STEERED)
    assert (coefficients.kl, coefficients.entropy) == (0.1, 0.0)  # no entropy is measured yet
    # Over 10 + 30 tokens: KL (1 * 10 + 0 * 30) / 40 = 0.25, five times the target: + 20 % per horizon, of
    # which this is half.
    coefficients.adapt([result(kl=1.0, entropy=0.2), result(kl=0.0, entropy=0.6, tokens=30)], sequences=50)
    assert coefficients.kl == pytest.approx(0.11)
    assert coefficients.entropy == pytest.approx(0.014)  # 0.5 is below 1
    coefficients.adapt([result(kl=0.0, entropy=0.9)], sequences=100)
    assert coefficients.kl == pytest.approx(0.11 * 0.8)
    assert coefficients.entropy == pytest.approx(0.016)  # the maximum
    coefficients.adapt([result(kl=0.05, entropy=1.1)], sequences=100)
    assert coefficients.kl == pytest.approx(0.11 * 0.8)
    assert coefficients.entropy == 0.0
    assert coefficients.state()["entropy"] == pytest.approx(0.012)
    assert coefficients.metrics() == {
        "policy/kl_coefficient": pytest.approx(0.088),
        "policy/entropy_coefficient": 0.0,
    }


@pytest.mark.parametrize(
    "results",
    [
        [],
        [result()],
        [result(kl=math.inf, entropy=math.nan)],
        [StepResult(metrics={}, grad_norm=0.0, lr=0.0)],
    ],
)
def test_a_step_that_measured_nothing_changes_nothing(results):
    coefficients = Coefficients(*STEERED)
    coefficients.adapt([result(kl=1.0, entropy=0.5)], sequences=50)
    before = coefficients.state()
    coefficients.adapt(results, sequences=50)
    assert coefficients.state() == before


def test_a_restart_goes_on_where_it_was():
    kl, entropy = STEERED
    straight = Coefficients(kl, entropy)
    history = [result(kl=0.3, entropy=0.4), result(kl=0.01, entropy=0.8), result(kl=0.2, entropy=1.3)]
    for one in history:
        straight.adapt([one], sequences=7)
        resumed = Coefficients(kl, entropy)
        resumed.resume(json.loads(json.dumps(straight.state(), allow_nan=False)))
        assert (resumed.kl, resumed.entropy, resumed.state()) == (
            straight.kl,
            straight.entropy,
            straight.state(),
        )
    resumed = Coefficients(kl, entropy)
    resumed.resume(Coefficients(kl, entropy).state())
    assert resumed.entropy == 0.0


def test_a_constant_is_the_configs_whatever_the_checkpoint_says():
    saved = {"kl": 5.0, "entropy": 6.0, "measured_entropy": 0.1}
    coefficients = Coefficients(KLConfig(coefficient=0.2), EntropyConfig(coefficient=-0.3))
    coefficients.resume(saved)
    coefficients.adapt([result(kl=9.0, entropy=9.0)], sequences=1000)
    assert (coefficients.kl, coefficients.entropy, coefficients.state()) == (0.2, -0.3, {})
    assert coefficients.metrics() == {"policy/kl_coefficient": 0.2, "policy/entropy_coefficient": -0.3}
    assert Coefficients(KLConfig(), EntropyConfig()).metrics() == {}


def test_a_lower_maximum_holds_for_a_bonus_from_before_a_restart():
    coefficients = Coefficients(KLConfig(), EntropyConfig(target=0.5, maximum=0.01))
    coefficients.resume({"entropy": 6.0, "measured_entropy": 0.1})
    assert coefficients.entropy == 0.01
