"""The order of one step is part of the contract."""

import re
from types import SimpleNamespace

import pytest

from asyncrl.batch.hooks import Hooks
from asyncrl.config.algorithm import KLConfig
from asyncrl.config.base import Choice
from asyncrl.hosting.progress import Pace
from tests.support.learner_world import World, learn
from tests.support.pages import ROOT


def test_by_default_a_batch_is_one_step_and_weights_are_out_before_anything_slow():
    world = World()
    learn(world)
    assert world.events == [
        "publish 3",
        *["collect 3", "step", "publish 4", "report 4", "checkpoint 4"],
        *["collect 4", "step", "publish 5", "report 5", "checkpoint 5 last"],
    ]


def test_columns_are_measured_once_before_the_first_step():
    world = World()
    learn(world, steps=4, epochs=2)
    measuring = ["measure", "gather"]
    assert world.events[1:] == [
        "collect 3",
        *measuring,
        "step",
        "step",
        "publish 4",
        "report 4",
        "checkpoint 4 last",
    ]


def test_the_critic_learns_from_the_same_minibatches_and_first():
    world = World()
    learn(world, steps=4, epochs=2, minibatches=2, advantage=Choice(name="gae"))
    assert world.events[2:12] == ["measure", "gather", *["critic"] * 4, *["step"] * 4]
    (step,) = world.reported
    assert [len(step.critic_results), len(step.results)] == [4, 4]


def test_while_the_critic_warms_up_the_version_counts_and_the_policy_stands_still():
    world = World()
    learn(world, version=0, steps=3, warmup_steps=2, advantage=Choice(name="gae"))
    trained = [event for event in world.events if event in ("critic", "step") or event.startswith("publish")]
    assert trained == [
        "publish 0",
        "critic",
        "publish 1",
        "critic",
        "publish 2",
        "critic",
        "step",
        "publish 3",
    ]
    assert [len(step.results) for step in world.reported] == [0, 0, 1]


def test_warm_up_steps_are_for_a_critic_that_is_there():
    world = World()
    learn(world, version=0, steps=1, warmup_steps=2)
    assert "step" in world.events


def test_the_reference_follows_after_the_steps_of_a_batch():
    world = World()
    learn(world, steps=4, epochs=2, kl=KLConfig(coefficient=0.1, reference_decay=0.9))
    assert world.events[2:8] == ["measure", "gather", "step", "step", "reference 0.9", "publish 4"]


@pytest.mark.parametrize("kl", [KLConfig(coefficient=0.1), KLConfig(reference_decay=0.9)])
def test_a_frozen_or_absent_reference_is_left_alone(kl):
    world = World()
    learn(world, steps=4, kl=kl)
    assert not [event for event in world.events if event.startswith("reference")]


def test_hooks_come_before_the_first_step_and_after_the_weights_are_out():
    world = World()
    learn(world, steps=4, advantage=Choice(name="gae"), hooks=Hooks([("w", world)]))
    order = [
        "collect 3",
        "measure",
        "gather",
        "before 8",
        "critic",
        "step",
        "publish 4",
        "after 4",
        "report 4",
    ]
    assert world.events[1:-1] == order
    assert world.reported[0].hook_metrics == {"hook/planned": 8.0, "hook/seen": 8.0}
    assert world.reported[0].seconds.keys() == {
        "wait_groups",
        "measure",
        "plan",
        "hooks",
        "critic",
        "train",
        "publish",
    }


def test_the_time_of_hooks_is_that_of_both_as_the_page_says(monkeypatch):
    now_s = [0.0]

    class Slow(World):
        def before_step(self, plan):
            now_s[0] += 1.0
            return super().before_step(plan)

        def after_step(self, step):
            now_s[0] += 2.0
            return super().after_step(step)

    monkeypatch.setattr("asyncrl.stopwatch.time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    world = Slow()
    learn(world, steps=4, hooks=Hooks([("w", world)]))
    assert world.reported[0].seconds["hooks"] == 3.0
    page = (ROOT / "docs" / "planes" / "learning.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `time/hooks` \| (.*) \|$", page, re.MULTILINE)
    assert page.count("before_step") == page.count("after_step") == 1
    assert "before_step" in row and "after_step" in row


def test_a_step_reports_the_coefficients_it_used_and_the_next_uses_what_it_measured():
    world = World()
    world.sums = {"tokens": 4.0, "policy/kl_reference": 4.0}  # 1 nat per token, far above the target
    algorithm = learn(world, kl=KLConfig(coefficient=0.1, target=0.01, horizon=8 / 0.5))
    used = [step.coefficients["policy/kl_coefficient"] for step in world.reported]
    assert used == pytest.approx([0.1, 0.11])  # a fifth of the share of 8 sequences in the horizon
    assert algorithm.coefficients.kl == pytest.approx(0.121)


def test_a_finished_run_only_publishes():
    world = World()
    learn(world, version=5)
    assert world.events == ["publish 5"]


def test_each_part_of_a_step_is_shown_to_the_supervisor_and_slow_ones_as_slow(monkeypatch):
    world, shown = World(), []
    for module in ("learner", "stopwatch"):
        monkeypatch.setattr(
            f"asyncrl.{module}.begin", lambda doing, pace=Pace.NORMAL: shown.append((doing, pace))
        )
    learn(world, steps=4)
    assert [doing for doing, _ in shown] == [
        *[
            "publish",
            "wait_groups",
            "measure",
            "plan",
            "hooks",
            "critic",
            "train",
            "publish",
            "hooks",
            "report",
            "checkpoint",
        ]
    ]
    assert {doing for doing, pace in shown if pace is Pace.SLOW} == {"hooks", "checkpoint"}
