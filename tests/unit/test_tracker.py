"""Expected rewards of rows against a Beta posterior that forgets, through whole steps and restarts."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.batch.hooks import Hooks
from asyncrl.batch.plan import Plan
from asyncrl.batch.recipe import Recipe
from asyncrl.batch.resolve import make_recipe
from asyncrl.buffer.intake import Collected
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig, KLConfig
from asyncrl.config.base import Choice
from asyncrl.config.sections import BatchConfig
from asyncrl.learner import run_learner
from asyncrl.run.manifest import FileOps
from asyncrl.run.saved import LearnerState
from asyncrl.types import Group
from tests.support.failed_saves import run_on
from tests.support.fake_learner import SETTINGS, Batch, known
from tests.support.learner_world import World

ROWS = 5


def row_of(ticket_id: int) -> int:
    return ticket_id % ROWS


def batch_of(*answers: tuple[int, list[float]]) -> list[Group]:
    """A group for each (ticket, rewards)."""
    batch = Batch()
    for _, rewards in answers:
        batch.group(*(batch.rollout(reward, [5] * (2 + i)) for i, reward in enumerate(rewards)))
    tickets = [ticket for ticket, _ in answers]
    return [replace(group, ticket_id=ticket) for group, ticket in zip(batch.groups, tickets, strict=True)]


STEPS = [
    batch_of((1, [1.0]), (2, [0.0]), (3, [1.0]), (4, [0.0])),  # none was seen before
    batch_of((6, [1.0]), (12, [1.0]), (8, [0.0]), (5, [1.0])),  # one is new
    batch_of((11, [0.0]), (21, [0.5]), (16, [1.0]), (9, [0.0])),  # one row three times
    batch_of((7, [1.0, 0.0, 0.0]), (13, [0.25]), (27, [1.0, 1.0]), (10, [0.0])),  # in groups, too
    batch_of((14, [1.0]), (15, [1.0]), (31, [0.0]), (22, [1.0])),
]
OUTSIDE = [
    batch_of(*((group.ticket_id, [8.0 * r.reward - 5.0 for r in group.rollouts]) for group in groups))
    for groups in STEPS
]
ONE_ROW = [
    batch_of((0, [1.0]), (5, [0.0]), (10, [0.0]), (15, [0.0])),
    batch_of((20, [0.0]), (25, [1.0]), (30, [1.0]), (35, [0.0])),
]
ALONE = [batch_of((4, [1.0])), batch_of((9, [0.0]))]


def expected(steps: list[list[Group]], decay: float) -> list[list[float]]:
    """[step][answer]: the advantage, with a posterior of successes and failures for each row."""
    alpha, beta, seen, found = np.zeros(ROWS), np.zeros(ROWS), np.zeros(ROWS, dtype=bool), []
    for groups in steps:
        rows = np.array([group.ticket_id % ROWS for group in groups for _ in group.rollouts])
        rewards = np.array([rollout.reward for group in groups for rollout in group.rollouts])
        new = np.setdiff1d(rows, np.flatnonzero(seen))
        alpha[new], beta[new], seen[new] = rewards.mean(), 1.0 - rewards.mean(), True
        a = rewards - alpha[rows] / (alpha[rows] + beta[rows])
        variance = a.var(ddof=1) if len(a) > 1 else 0.0
        found.append(((a - a.mean()) / np.sqrt(variance + 1e-8)).tolist())
        alpha[np.unique(rows)] *= decay
        beta[np.unique(rows)] *= decay
        np.add.at(alpha, rows, rewards)
        np.add.at(beta, rows, 1.0 - rewards)
    return found


class Recorded(World):
    """Trains given batches, of which version v takes the v-th."""

    def __init__(self, steps: list[list[Group]]) -> None:
        super().__init__()
        self.steps = steps

    def collect(self, version: int) -> Collected:
        return Collected(groups=[*self.steps[version]], takes=1)


def recipe_of(steps: list[list[Group]], state: LearnerState | None = None, **algorithm: Any) -> Recipe:
    algorithm.setdefault("advantage", Choice(name="spo"))
    made = make_recipe(
        AlgorithmConfig(**algorithm),
        BatchConfig(groups=len(steps[0])),
        CriticConfig(),
        replace(SETTINGS, mask_stale=False),
        max_response_tokens=8,
        reward_parts=(),
        row=row_of,
    )
    assert made.planner.estimator.tracker is not None
    made.planner.estimator.tracker.resume((state or LearnerState()).tracker)
    return made


def advantages(plan: Plan) -> list[float]:
    """Of each answer, whose tokens have the same."""
    assert all(len({*one.advantages.tolist()}) == 1 for one in plan.sequences)
    return [float(one.advantages[0]) for one in plan.sequences]


def trained(recipe: Recipe, steps: list[list[Group]], version: int, end: int) -> list[list[float]]:
    world = Recorded(steps)
    part: Any = world
    run_learner(part, part, recipe, Hooks(), version=version, steps=end)
    return [advantages(step.plan) for step in world.reported]


@pytest.mark.parametrize(
    "steps", [STEPS, OUTSIDE, ONE_ROW, ALONE], ids=["in 0..1", "outside", "row", "alone"]
)
@pytest.mark.parametrize("decay", [0.9, 0.5, 0.0, 1.0])
def test_an_answer_is_compared_with_what_earlier_batches_say_of_its_row(steps, decay):
    recipe = recipe_of(steps, advantage=Choice(name="spo", decay=decay))
    for found, right in zip(trained(recipe, steps, 0, len(steps)), expected(steps, decay), strict=True):
        assert found == pytest.approx(right, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("cut", range(1, len(STEPS)))
def test_a_resumed_run_continues_with_the_same_numbers(cut, tmp_path):
    """Through the checkpoint of rank 0, to the last bit."""
    whole = recipe_of(STEPS)
    wanted = trained(whole, STEPS, 0, len(STEPS))
    first = recipe_of(STEPS)
    begun = trained(first, STEPS, 0, cut)
    saving, _ = run_on(tmp_path, FileOps(), every=1)
    saving.tracker = first.planner.estimator.tracker
    saving.checkpoint(cut, last=False)
    saving.exports.finish()
    second = recipe_of(STEPS, LearnerState.from_dict(saving.checkpoints.state(cut)))
    assert begun + trained(second, STEPS, cut, len(STEPS)) == wanted
    assert second.planner.estimator.tracker.state() == whole.planner.estimator.tracker.state()


def test_by_default_a_batch_leaves_nine_tenths_of_the_weight():
    recipe = recipe_of(ONE_ROW)
    trained(recipe, ONE_ROW, 0, 1)
    assert json.loads(json.dumps(recipe.planner.estimator.tracker.state())) == {
        "0": [0.9 * 0.25 + 1.0, 0.9 + 4.0]
    }


def test_planning_alone_records_nothing():
    recipe = recipe_of(STEPS)
    samples = recipe.planner.assemble(STEPS[0], 5)
    first, again = (recipe.planner.plan(STEPS[0], samples, {}, 0.0) for _ in range(2))
    assert advantages(first) == advantages(again) and recipe.planner.estimator.tracker.state() == {}
    assert first.rewards.row_S.tolist() == [1, 2, 3, 4]


def test_a_row_is_expected_to_pay_for_the_kl_too():
    recipe = recipe_of(ALONE, kl=KLConfig(coefficient=0.25, placement="reward", estimator=Choice(name="k1")))
    trained(recipe, ALONE, 0, 1)
    (rollout,) = ALONE[0][0].rollouts
    paid = sum(known("logprobs_T", t) - known("reference_logprobs_T", t) for t in rollout.response_ids)
    assert recipe.planner.estimator.tracker.state() == {"4": [pytest.approx(1.9 * (1.0 - 0.25 * paid)), 1.9]}


def test_a_batch_that_is_not_finite_is_forgotten():
    recipe = recipe_of(STEPS)
    trained(recipe, STEPS, 0, 2)
    before = recipe.planner.estimator.tracker.state()
    plan = recipe.planner.plan(STEPS[2], recipe.planner.assemble(STEPS[2], 5), {}, 0.0)
    for wrong in (torch.nan, torch.inf):
        rewards = plan.rewards.rewards_S.clone()
        rewards[1] = wrong
        recipe.planner.estimator.tracker.record(replace(plan.rewards, rewards_S=rewards))
    assert recipe.planner.estimator.tracker.state() == before != {}


def test_a_users_advantage_forgets_only_if_it_has_a_decay(tmp_path):
    file = tmp_path / "mine.py"
    text = "def {0}(rewards, {1}):\n    return rewards.per_token(rewards.column('expected_S'))\n"
    text += "{0}.needs = ('expected_S',)\n"
    file.write_text(text.format("never", "") + text.format("some", "*, decay=0.25, other=1"))
    for name, params, decay in (("never", {}, 1.0), ("some", {}, 0.25), ("some", {"decay": 0.75}, 0.75)):
        recipe = recipe_of(ALONE, advantage=Choice(name=f"{file}:{name}", **params))
        assert trained(recipe, ALONE, 0, 2) == [[1.0], [1.0]]
        assert recipe.planner.estimator.tracker.state() == {
            "4": [decay * (decay + 1.0), decay * (decay + 1.0) + 1.0]
        }


def test_other_advantages_keep_no_record():
    recipe = make_recipe(
        AlgorithmConfig(), BatchConfig(), CriticConfig(), SETTINGS, max_response_tokens=8, reward_parts=()
    )
    assert recipe.planner.estimator.tracker is None and recipe.planner.estimator.tracker is None
