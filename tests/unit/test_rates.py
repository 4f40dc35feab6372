"""The learning rate of every optimizer step: formulas, and what holds for every schedule."""

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any, get_args

import pytest

from asyncrl.config.algorithm import OptimizerConfig, Schedule
from asyncrl.preflight.outside import outside_problems
from asyncrl.trainer.rates import rate_share
from tests.support.task_config import config_of

SIZES = [(0, 1), (0, 12), (1, 12), (4, 12), (11, 12), (30, 12)]
FINAL = 0.25
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr_rate": FINAL},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": FINAL * 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 5, "decay_type": "linear", "min_lr_ratio": FINAL},
}


def shares(schedule: str, warmup: float, total: int, *, steps: int | None = None) -> list[float]:
    arguments = ARGUMENTS.get(schedule, {})
    config = OptimizerConfig(lr=1e-3, schedule=schedule, warmup_steps=warmup, schedule_arguments=arguments)
    share = rate_share(**config.rates(total))
    return [share(step) for step in range(total if steps is None else steps)]


@pytest.mark.parametrize(("warmup", "total"), SIZES)
def test_every_step_is_the_formula(warmup: int, total: int) -> None:
    """With and without a rate that is left at the end."""
    rising = max(1, warmup)
    found = {name: shares(name, warmup, total) for name in ("constant", "linear", "cosine")}
    found |= {name: shares(name, warmup, total) for name in ("polynomial", "cosine_with_min_lr")}
    for step in range(total):
        if step < rising:
            assert {each[step] for each in found.values()} == {(step + 1) / rising}
            continue
        p = Fraction(step + 1 - rising, total + 1 - rising)
        # half of 1 + cos x is the square of the cosine of x / 2
        line, wave = float(1 - p), math.cos(math.pi * float(p) / 2) ** 2
        expected = {"constant": 1.0, "linear": line, "cosine": wave}
        expected |= {"polynomial": FINAL + (1 - FINAL) * line}
        expected |= {"cosine_with_min_lr": FINAL + (1 - FINAL) * wave}
        assert {name: each[step] for name, each in found.items()} == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_no_step_has_the_rate_zero_and_none_more_than_the_rate(schedule: str) -> None:
    found = shares(schedule, 3, 10, steps=14)
    assert all(a < b for a, b in pairwise(found[:3])) and found[2] == 1.0
    assert all(0 < share <= 1 for share in found[:10])
    if schedule != "cosine_with_restarts":
        assert all(a >= b for a, b in pairwise(found[2:]))


@pytest.mark.parametrize("schedule", ["polynomial", "cosine_with_min_lr", "warmup_stable_decay"])
def test_a_falling_rate_stays_at_its_end_after_the_run(schedule: str) -> None:
    found = shares(schedule, 3, 10, steps=14)
    assert found[9] > FINAL and found[10:] == pytest.approx([FINAL] * 4)


def test_restarts_come_back_to_the_rate() -> None:
    found = shares("cosine_with_restarts", 1, 20)
    assert found[10] == pytest.approx(1.0, abs=0.03) and found[9] < 0.03


def test_a_share_of_the_steps_is_a_warm_up_of_so_many() -> None:
    assert shares("linear", 0.25, 12) == shares("linear", 3, 12)
    assert OptimizerConfig(warmup_steps=0.01).warmup_of(12) == 1


def test_a_run_of_many_steps_has_its_schedule_checked_up_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share leaves its range in the last step alone."""
    asked: list[int] = []
    many = 10**6

    def share(step: int) -> float:
        asked.append(step)
        return 2.0 if step == many - 1 else 1.0

    monkeypatch.setattr("asyncrl.preflight.outside.rate_share", lambda **arguments: share)
    learner = {"steps": many, "optimizer": {"schedule": "polynomial"}}
    config = config_of(learner=learner)
    (mistake, *_) = outside_problems(config, resumes=False, generators=False)
    assert "from 1 to 2 times lr" in mistake.text and len(asked) < 30_000
    assert {0, many - 1} <= {*asked}


def test_without_a_warm_up_no_schedule_is_moved_on() -> None:
    """transformers takes 10,000 steps for the falling part of `inverse_sqrt` then, and 1 for a warm-up of 1."""
    assert shares("inverse_sqrt", 0, 100) == pytest.approx(
        [(1 + step / 10_000) ** -0.5 for step in range(100)]
    )
    assert shares("inverse_sqrt", 4, 6) == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, (4 / 5) ** 0.5, (4 / 6) ** 0.5]
    )
