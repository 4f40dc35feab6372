"""What is published about a step."""

import logging
import math
from dataclasses import replace
from itertools import permutations

import pytest

from asyncrl.report.step_metrics import source_metrics, step_metrics
from asyncrl.trainer.base import StepResult
from asyncrl.types import Group
from tests.support.steps import group, rollout, step


def test_majorities_of_groups_are_told_if_a_reward_says_what_the_answer_is():
    answered = [
        replace(rollout(a=reward), answer=answer) for reward, answer in ((1.0, "4"), (0.0, "5"), (0.0, ""))
    ]
    metrics = step_metrics(step(*answered))
    assert (metrics["completions/answered_share"], metrics["group/majority"]) == (pytest.approx(2 / 3), 0.5)
    assert (
        not {"completions/answered_share", "group/majority"}
        & step_metrics(step(rollout(a=1.0), rollout(a=0.0))).keys()
    )


def test_the_reward_of_a_source_is_the_mean_over_its_rollouts():
    groups = [
        replace(group(rewards, [1] * len(rewards)), ticket_id=ticket)
        for ticket, rewards in ((1, [1.0, 0.0]), (2, [0.5, 0.5]), (3, [1.0, 1.0, 1.0, 0.0]))
    ]
    found = source_metrics(groups, lambda ticket: "words" if ticket == 2 else "sums")
    assert found == {"reward/sums/mean": pytest.approx(4 / 6), "reward/words/mean": 0.5}


def taken(*rejected: tuple[Group, str]) -> dict[str, float]:
    """Metrics of a step that also took these groups; what it trains has rewards 1 and 0."""
    base = step(rollout(a=1.0), rollout(a=0.0))
    return step_metrics(replace(base, collected=replace(base.collected, rejected=rejected)))


def test_rejected_groups_are_counted_and_measured_by_reason():
    dead = Group.dead(3, "reward failed", generator_id="g", version=0)
    metrics = taken(
        (group([0.0, 0.0], [10, 20]), "zero_variance"),
        (group([0.0, 1.0], [60, 30]), "stale"),
        (group([1.0, 1.0], [3, 3]), "zero_variance"),
        (dead, "dead: reward failed"),
    )
    assert {
        name: value
        for name, value in metrics.items()
        if name.startswith("groups/") and "collapsed" not in name
    } == {
        "groups/trained": 1,
        "groups/takes": 1,
        "groups/rejected_zero_variance": 2,
        "groups/rejected_stale": 1,
        "groups/rejected_dead": 1,
        "groups/rejected_untrainable": 0,
        "groups/rejected_deadly": 0,
        "groups/length_rejected_zero_variance": 9.0,
        "groups/length_rejected_stale": 45.0,
    }
    assert metrics["completions/length_mean"] == 2.0


def test_groups_of_one_reward_are_counted_by_it_whether_they_were_trained_or_not():
    values = {
        "below_0": [-1.0, -1e-5],
        "at_0": [0.0, 1e-7, -1e-7],
        "between": [0.5, 1e-5],
        "at_1": [1.0],
        "above_1": [1.1, 9.0],
    }
    rejected = [
        (group([value] * 3, [1, 1, 1]), "zero_variance") for where in values.values() for value in where
    ]
    others = [
        (group([0.0], [1]), "stale"),
        (group([0.0, 2e-6], [1, 1]), "stale"),
        (group([1.0, 0.0, 1.0], [1, 1, 1]), "stale"),
    ]
    metrics = taken(*rejected, *others, (group([1.0, 1.0], [1, 1]), "stale"))
    expected = {where: len(items) for where, items in values.items()} | {"at_1": 2}
    assert {name: metrics[f"groups/collapsed_{name}"] for name in values} == expected
    flat = step_metrics(step(rollout(a=1.0), rollout(a=1.0)))
    assert flat["groups/collapsed_at_1"] == 1 and flat["groups/collapsed_at_0"] == 0


def result(grad_norm: float, skipped: float = 0.0) -> StepResult:
    return StepResult(metrics={"tokens": 10.0, "skipped_steps": skipped}, grad_norm=grad_norm, lr=1e-6)


def test_a_part_is_averaged_over_the_rollouts_that_have_it_and_no_other_part_makes_a_name():
    metrics = step_metrics(step(rollout(old=4.0), rollout(new=1.0), rollout(new=0.0, stranger=2.0)))
    parts = {
        name: value for name, value in metrics.items() if name.startswith("reward/") and name.count("/") > 1
    }
    assert parts == {"reward/old/mean": 4.0, "reward/new/mean": 0.5}


def test_skipped_steps_are_counted_and_said(caplog):
    with caplog.at_level(logging.WARNING):
        assert (
            step_metrics(step(rollout(a=1.0), results=(result(1.0), result(2.0))))["policy/skipped_steps"]
            == 0
        )
        assert not caplog.records
        skipped = tuple(result(math.nan, 1.0) for _ in range(2))
        metrics = step_metrics(step(rollout(a=1.0), results=(*skipped, result(2.0))))
    assert metrics["policy/skipped_steps"] == 2 and "skipped_steps" not in metrics
    assert "step 1: 2 of 3 optimizer steps were left out" in caplog.text
    assert metrics["policy/empty_steps"] == 0


def test_a_step_whose_tokens_are_all_masked_is_no_step_that_is_not_finite(caplog):
    results = (result(0.0, 1.0), result(2.0))
    with caplog.at_level(logging.WARNING):
        metrics = step_metrics(step(rollout(a=1.0), results=results))
    assert (metrics["policy/empty_steps"], metrics["policy/skipped_steps"]) == (1, 0)
    assert not caplog.records


def test_the_largest_gradient_norm_does_not_depend_on_the_order():
    for norms in permutations((1.0, math.nan, 3.0)):
        metrics = step_metrics(step(rollout(a=1.0), results=tuple(map(result, norms))))
        assert math.isnan(metrics["policy/grad_norm"])
    assert step_metrics(step(rollout(a=1.0), results=(result(1.0), result(3.0))))["policy/grad_norm"] == 3.0
    assert step_metrics(step(rollout(a=1.0)))["policy/grad_norm"] == pytest.approx(0.0)
