"""The learning rate of every optimizer step: its formula, and transformers' schedules as an oracle."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
)

from asyncrl.algo.rates import rate_share

SIZES = [(0, 1), (0, 12), (1, 12), (4, 12), (11, 12), (30, 12)]
FINAL = 0.25


def shares(schedule: str, warmup: int, total: int, *, steps: int | None = None) -> list[float]:
    rate = {"schedule": schedule, "warmup_steps": warmup, "total_steps": total, "final_share": FINAL}
    return [rate_share(step, **rate) for step in range(total if steps is None else steps)]


@pytest.mark.parametrize(("warmup", "total"), SIZES)
def test_every_step_is_the_formula(warmup: int, total: int) -> None:
    rising = max(1, warmup)
    for step, (constant, linear, cosine) in enumerate(
        zip(*(shares(name, warmup, total) for name in ("constant", "linear", "cosine")), strict=True)
    ):
        if step < rising:
            assert constant == linear == cosine == (step + 1) / rising
            continue
        p = Fraction(step + 1 - rising, total + 1 - rising)
        assert constant == 1.0
        assert linear == pytest.approx(float(FINAL + (1 - FINAL) * (1 - p)), abs=1e-15)
        # half of 1 + cos x is the square of the cosine of x / 2
        assert cosine == pytest.approx(FINAL + (1 - FINAL) * math.cos(math.pi * float(p) / 2) ** 2, abs=1e-15)


@pytest.mark.parametrize(("warmup", "total"), SIZES)
def test_the_rates_are_those_of_transformers_without_its_first_which_is_zero(warmup: int, total: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    rising, longer = max(1, warmup), total + 1
    theirs = {
        "constant": get_constant_schedule_with_warmup(optimizer, rising),
        "linear": get_polynomial_decay_schedule_with_warmup(
            optimizer, rising, max(longer, rising + 1), lr_end=FINAL, power=1.0
        ),
        "cosine": get_cosine_with_min_lr_schedule_with_warmup(optimizer, rising, longer, min_lr_rate=FINAL),
    }
    for name, scheduler in theirs.items():
        expected = [scheduler.lr_lambdas[0](step + 1) for step in range(total)]
        assert shares(name, warmup, total) == pytest.approx(expected, abs=1e-12), name


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_falling_rate_never_rises_and_stays_at_the_final_share_after_the_run(schedule: str) -> None:
    found = shares(schedule, 3, 10, steps=14)
    assert found[2] == 1.0 and all(a > b for a, b in pairwise(found[2:11]))
    assert found[9] > FINAL and found[10:] == pytest.approx([FINAL] * 4)
