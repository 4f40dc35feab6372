"""The example of docs/hooks.md: loaded as a user's config loads it, and right in its arithmetic."""

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from asyncrl.batch.hooks import Hooks
from asyncrl.config import registry
from asyncrl.config.base import Choice
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.report.step_metrics import step_metrics
from tests.support.learner_world import World, learn

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
SNIPPET = GUIDE.split("```yaml\n")[1].split("```")[0]
BASE = {
    "run": {"name": "a"},
    "model": {"path": "m"},
    "data": {"train": "t.jsonl"},
    "reward": {"functions": [{"function": "gsm8k"}]},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The snippet of the guide on top of the least that a run needs."""
    monkeypatch.chdir(ROOT)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**BASE, **yaml.safe_load(SNIPPET)}))
    return load_config(path)


def shaped(config: Config, tokens: int, reward: float = 1.0, **changes: float) -> float:
    (choice,) = config.algorithm.shaping
    shape = registry.resolve("shaping", choice.name, {**choice.params, **changes})
    return shape(reward, response_tokens=tokens, max_response_tokens=256, finish_reason="stop")


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        (0, 0.1),
        (15, 0.05),
        (29, 0.1 / 30),
        (30, 0.0),
        (55, 0.0),
        (80, 0.0),
        (81, 0.1 / 80),
        (120, 0.05),
        (160, 0.1),
        (999, 0.1),
    ],
)
def test_a_response_pays_for_its_distance_from_the_band_and_never_more_than_a_tenth(
    config: Config, tokens: int, penalty: float
):
    assert shaped(config, tokens) == pytest.approx(1.0 - penalty)
    assert shaped(config, tokens, reward=-3.0) == pytest.approx(-3.0 - penalty)
    assert shaped(config, tokens, magnitude=5.0, weight=0.2) == pytest.approx(1.0 - 10 * penalty)
    # No lower bound.
    assert shaped(config, tokens, low=0) == pytest.approx(1.0 - (penalty if tokens > 80 else 0.0))


def test_a_wrong_answer_of_the_right_length_is_worth_less_than_a_right_one_of_any(config: Config):
    assert max(shaped(config, tokens, reward=0.0) for tokens in range(257)) < min(
        shaped(config, tokens) for tokens in range(257)
    )


def plan(*responses: tuple[int, float]) -> SimpleNamespace:
    """Of (length, advantage)."""
    return SimpleNamespace(
        sequences=[
            SimpleNamespace(
                response_ids=np.zeros(n),
                advantages=np.full(n, a, dtype=np.float32),
                keep=np.ones(n, dtype=bool),
            )
            for n, a in responses
        ]
    )


def step(version: int, *lengths: int) -> SimpleNamespace:
    group = SimpleNamespace(rollouts=[SimpleNamespace(actions=n) for n in lengths])
    return SimpleNamespace(version=version, collected=SimpleNamespace(groups=[group]))


def test_the_pull_says_which_way_a_step_will_move_the_length(config: Config):
    hooks = Hooks.load(config.learner.hooks)
    longer = hooks.before_step(plan((20, -1.0), (60, 1.0), (100, 0.0)))
    assert longer == {
        "hook/length/pull": pytest.approx((-1.0 * -40 + 0) / 3),
        "hook/length/outside_share": pytest.approx(2 / 3),
    }
    assert hooks.before_step(plan((40, 1.0), (60, -1.0)))["hook/length/pull"] == pytest.approx(-10.0)
    # A length that is rewarded as any other pulls nowhere, and a masked response teaches nothing.
    assert hooks.before_step(plan((10, 0.5), (90, 0.5)))["hook/length/pull"] == 0.0
    masked = plan((40, 1.0), (60, 0.0))
    masked.sequences[0].keep[:] = False
    assert hooks.before_step(masked)["hook/length/pull"] == 0.0


def test_the_mean_is_exponential_and_begins_at_what_it_first_sees(config: Config):
    hooks = Hooks.load(config.learner.hooks)
    assert hooks.after_step(step(1, 40, 60)) == {"hook/length/mean": 50.0, "hook/length/drift": 0.0}
    second = hooks.after_step(step(2, 70))
    assert second == {"hook/length/mean": pytest.approx(52.0), "hook/length/drift": pytest.approx(2.0)}


def test_it_warns_once_when_the_mean_leaves_the_band_and_at_every_large_drift(
    config: Config, caplog: pytest.LogCaptureFixture
):
    hooks = Hooks.load(config.learner.hooks)
    for version, length in enumerate([75, 75, 120, 120, 120, 70, 70, 70, 70, 70, 200], start=1):
        hooks.after_step(step(version, length))
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    left = [record.getMessage() for record in caplog.records if "outside" in record.getMessage()]
    drifted = [record.getMessage() for record in caplog.records if "moved by" in record.getMessage()]
    # 75, 75, 79.5, 83.6, 87.2, 85.5, ... 80.2, 92.2: out at step 4 and not in again before the end.
    assert [message.split(":")[0] for message in left] == ["step 4"]
    assert [message.split(":")[0] for message in drifted] == ["step 11"] and "+12" in drifted[0]


def test_coming_back_and_leaving_again_warns_again(config: Config, caplog: pytest.LogCaptureFixture):
    (choice,) = config.learner.hooks
    hook = registry.load(choice.name)(decay=0.0, largest_drift_tokens=1000)
    for version, length in enumerate([20, 20, 50, 90, 90], start=1):
        hook.after_step(step(version, length))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 1", "step 4"]


def test_it_runs_in_the_learner_and_shapes_what_the_advantages_see(config: Config):
    world = World()
    hooks = Hooks.load(config.learner.hooks)
    learn(world, hooks=hooks, advantage=Choice(name="dr_grpo"), shaping=config.algorithm.shaping)
    for trained in world.reported:
        assert set(trained.hook_metrics) == {
            f"hook/length/{name}" for name in ("mean", "drift", "pull", "outside_share")
        }
        assert trained.hook_metrics["hook/length/outside_share"] == 1.0  # of 1 to 8 tokens
        rollouts = [one for taken in trained.collected.groups for one in taken.rollouts]
        expected = [one.reward - 0.1 * (30 - one.actions) / 30 for one in rollouts]
        assert trained.plan.rewards.rewards_S.tolist() == pytest.approx(expected)
        published = step_metrics(trained)
        assert published["hook/length/mean"] == pytest.approx(published["completions/length_mean"])


def test_every_number_of_the_example_is_in_the_guide(config: Config):
    hooks = Hooks.load(config.learner.hooks)
    for name in {**hooks.before_step(plan((40, 1.0))), **hooks.after_step(step(1, 40))}:
        assert f"`{name}`" in GUIDE
