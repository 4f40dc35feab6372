"""What is published of a critic, of coefficients and of hooks."""

import dataclasses
import logging
import math

import pytest
import torch

from asyncrl.config.checkpoint_section import METRICS
from asyncrl.learner import Step
from asyncrl.report.step_metrics import step_metrics
from asyncrl.trainer.base import StepResult
from tests.support.metric_guide import documented
from tests.support.steps import rollout, step

VALUES_T = torch.tensor([0.5, 0.5, 0.0, 1.0])
RETURNS_T = torch.tensor([1.0, 0.0, 0.0, 1.0])


def critic_result(loss: float, grad_norm: float, clipped: float, skipped: float = 0.0) -> StepResult:
    sums = {"tokens": 4.0, "loss": loss, "critic/value_clipped": clipped, "skipped_steps": skipped}
    return StepResult(metrics=sums, grad_norm=grad_norm, lr=1e-5)


def step_with_critic(*results: StepResult) -> Step:
    base = step(rollout(a=1.0), rollout(a=0.0))
    rewards = dataclasses.replace(base.plan.rewards, values_T=VALUES_T)
    plan = dataclasses.replace(base.plan, rewards=rewards, returns_T=RETURNS_T)
    return dataclasses.replace(base, plan=plan, critic_results=results)


def test_the_critic_is_reported_over_its_steps_and_over_all_tokens():
    published = step_metrics(step_with_critic(critic_result(0.2, 1.0, 1.0), critic_result(0.4, 3.0, 2.0)))
    critic = {name: value for name, value in published.items() if name.startswith("critic/")}
    # Returns minus values: 0.5, -0.5, 0, 0 with variance 1/8; returns: variance 1/4.
    assert critic == pytest.approx(
        {
            "critic/loss": 0.3,
            "critic/grad_norm": 3.0,
            "critic/lr": 1e-5,
            "critic/skipped_steps": 0.0,
            "critic/value_clipped": 3 / 8,
            "critic/explained_variance": 0.5,
            "critic/value_mean": 0.5,
            "critic/value_min": VALUES_T.min().item(),
            "critic/value_max": VALUES_T.max().item(),
            "critic/return_mean": 0.5,
            "critic/return_min": RETURNS_T.min().item(),
            "critic/return_max": RETURNS_T.max().item(),
        }
    )
    assert critic.keys() <= documented()


def test_what_earlier_batches_foretold_is_reported_over_answers():
    base = step(rollout(a=1.0), rollout(a=0.0))
    assert "baseline/explained_variance" not in step_metrics(base)
    expected_S = torch.tensor([0.75, 0.25], dtype=torch.float64)
    plan = dataclasses.replace(
        base.plan, rewards=dataclasses.replace(base.plan.rewards, expected_S=expected_S)
    )
    # Rewards 1 and 0 have the variance 1/4, what is left of them, 1/4 and -1/4, has 1/16.
    found = step_metrics(dataclasses.replace(base, plan=plan))
    assert found["baseline/explained_variance"] == pytest.approx(0.75)
    assert "baseline/explained_variance" in documented() & METRICS


def test_skipped_steps_of_the_critic_are_said(caplog):
    with caplog.at_level(logging.WARNING):
        published = step_metrics(
            step_with_critic(critic_result(0.2, math.nan, 1.0, 1.0), critic_result(0.4, 3.0, 2.0))
        )
    assert published["critic/skipped_steps"] == 1 and math.isnan(published["critic/grad_norm"])
    assert "step 1, critic: 1 of 2 optimizer steps were left out" in caplog.text


def test_coefficients_and_hooks_keep_their_names():
    base = step(rollout(a=1.0))
    extra = dataclasses.replace(
        base, coefficients={"policy/kl_coefficient": 0.1}, hook_metrics={"hook/x": 2.0}
    )
    assert step_metrics(extra).items() - step_metrics(base).items() == {
        ("policy/kl_coefficient", 0.1),
        ("hook/x", 2.0),
    }
    assert {"policy/kl_coefficient", "policy/entropy_coefficient", "hook/<>"} <= documented()
